//! Generates the gRPC code from `proto/snapyard/*.proto`.

fn main() -> std::io::Result<()> {
    tonic_prost_build::configure().compile_protos(
        &[
            "proto/snapyard/node.proto",
            "proto/snapyard/scheduler.proto",
            "proto/snapyard/catalog.proto",
            "proto/snapyard/storage.proto",
        ],
        &["proto"],
    )
}
