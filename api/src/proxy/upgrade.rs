//! Connections that stop being HTTP: WebSocket and the like. After both sides have switched, bytes are passed on in
//! both directions until either end closes, the guest goes away, or the server shuts down.

use http::{HeaderValue, Response, StatusCode, header};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::headers::{set_upgrade, strip_hop_by_hop};

/// Turns the guest's 101 into the one for the client, and joins the two connections once both have switched.
pub(super) fn switch<B, C: Default>(
    mut response: Response<B>,
    client: OnUpgrade,
    wanted: HeaderValue,
    tasks: &TaskTracker,
    stop: CancellationToken,
) -> Response<C> {
    debug_assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    let guest = hyper::upgrade::on(&mut response);
    tasks.spawn(stop.run_until_cancelled_owned(async move {
        let (client, guest) = match tokio::try_join!(client, guest) {
            Ok((client, guest)) => (client, guest),
            Err(error) => return tracing::debug!(%error, "one side did not switch protocols"),
        };
        let copied = copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(guest)).await;
        tracing::debug!(?copied, "a switched connection ended");
    }));

    let (mut head, _) = response.into_parts();
    let protocol = head.headers.remove(header::UPGRADE).unwrap_or(wanted);
    strip_hop_by_hop(&mut head.headers);
    set_upgrade(&mut head.headers, protocol);
    head.extensions.clear();
    Response::from_parts(head, C::default())
}
