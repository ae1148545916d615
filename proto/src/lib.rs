//! The gRPC contracts between Snapyard's tiers, and what both ends of a call must agree on beyond the messages:
//! the cluster token, and whether a refused call may be sent again.

#![allow(rustdoc::invalid_html_tags, reason = "generated code repeats the comments of the .proto files")]
#![expect(missing_docs, reason = "generated code carries the comments of the .proto files only")]

pub mod auth;
pub mod retry;

/// Messages and services of package `snapyard.v1`.
pub mod v1 {
    tonic::include_proto!("snapyard.v1");
}
