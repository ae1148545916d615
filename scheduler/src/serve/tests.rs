//! The service over a real socket.

use snapyard_proto::auth::AttachToken;
use snapyard_proto::retry::marked;
use snapyard_proto::v1::scheduler_client::SchedulerClient;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

use super::*;

type Client = SchedulerClient<InterceptedService<Channel, AttachToken>>;

struct Running {
    client: Client,
    url: String,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), ServeError>>,
}

fn token(text: &str) -> ClusterToken {
    ClusterToken::new(text).expect("ascii")
}

async fn start() -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(serve(listener, SchedulerConfig::new(token("t")), async {
        let _ = stopped.await;
    }));
    Running { client: connect(&url, "t"), url, stop, server }
}

fn connect(url: &str, text: &str) -> Client {
    let channel = Endpoint::from_shared(url.to_owned()).expect("url").connect_lazy();
    SchedulerClient::with_interceptor(channel, token(text).attach())
}

fn report() -> NodeReport {
    NodeReport { node_id: "n".into(), url: "http://n".into(), max_sandboxes: 1, ..NodeReport::default() }
}

fn place(sandbox_id: &str) -> PlaceRequest {
    PlaceRequest { sandbox_id: sandbox_id.into(), ..PlaceRequest::default() }
}

/// Waits until the list of nodes says whether `n` is alive. Bounded by the test's own time limit.
async fn until_alive(client: &mut Client, wanted: bool) {
    loop {
        let nodes = client.list_nodes(ListNodesRequest {}).await.expect("list").into_inner().nodes;
        if nodes.iter().any(|node| node.alive) == wanted {
            return;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_node_is_alive_while_its_stream_is_and_shutdown_ends_it() {
    let mut running = start().await;
    let refused = running.client.place(place("a")).await.expect_err("no node yet");
    assert_eq!(refused.code(), tonic::Code::Unavailable);
    assert_eq!(marked(&refused), Some(ShouldRetry::Yes));

    let (reports, stream) = mpsc::channel(4);
    reports.send(report()).await.expect("open");
    let mut node = running.client.clone();
    let registration = tokio::spawn(async move { node.register(ReceiverStream::new(stream)).await });
    until_alive(&mut running.client, true).await;

    let placed = running.client.place(place("a")).await.expect("room").into_inner();
    assert_eq!((placed.node_id.as_str(), placed.url.as_str()), ("n", "http://n"));
    assert!(running.client.place(place("b")).await.expect_err("full").message().contains("full"));
    let release = ReleaseRequest { reservation_id: placed.reservation_id };
    running.client.release(release.clone()).await.expect("released");
    running.client.release(release).await.expect("again");

    drop(reports);
    registration.await.expect("joined").expect("the stream ended well");
    until_alive(&mut running.client, false).await;

    let (reports, stream) = mpsc::channel(4);
    reports.send(report()).await.expect("open");
    let mut node = running.client.clone();
    let registration = tokio::spawn(async move { node.register(ReceiverStream::new(stream)).await });
    until_alive(&mut running.client, true).await;
    running.stop.send(()).expect("running");
    running.server.await.expect("joined").expect("served");
    registration.await.expect("joined").expect("ended by the shutdown, with the sender still open");
    drop(reports);
}

#[tokio::test]
async fn bad_reports_and_callers_without_the_token_are_refused() {
    let mut running = start().await;
    let mut stranger = connect(&running.url, "other");
    assert_eq!(stranger.place(place("a")).await.expect_err("stranger").code(), tonic::Code::Unauthenticated);

    let nameless = tokio_stream::once(NodeReport::default());
    assert_eq!(running.client.register(nameless).await.expect_err("nameless").code(), tonic::Code::InvalidArgument);
    let renamed = tokio_stream::iter([report(), NodeReport { node_id: "m".into(), ..report() }]);
    assert_eq!(running.client.register(renamed).await.expect_err("renamed").code(), tonic::Code::InvalidArgument);
    assert_eq!(running.client.place(place("")).await.expect_err("no id").code(), tonic::Code::InvalidArgument);
}
