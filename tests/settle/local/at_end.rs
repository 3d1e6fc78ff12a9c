//! Settlement at the end of the body: by the units that the `RequestCost` has counted, and by bytes.

use std::num::NonZeroU32;

use http_body_util::BodyExt;

use super::*;

/// A service that streams the test's frames, and sends the charges to the test.
#[expect(clippy::type_complexity, reason = "services have no short names")]
fn streaming(
    layer: SettledLayer<LocalStore, Global>,
) -> (
    impl Service<
        Request<String>,
        Response = Response<TrackedBody<Frames>>,
        Error = Infallible,
        Future: Send,
    > + Clone,
    mpsc::UnboundedReceiver<(Sender, RequestCost)>,
) {
    let (started, streams) = mpsc::unbounded_channel();
    let inner = service_fn(move |request: Request<String>| {
        let (sender, body) = frames();
        started
            .send((
                sender,
                request.extensions().get::<RequestCost>().unwrap().clone(),
            ))
            .unwrap();
        async { Ok(Response::new(body)) }
    });
    (layer.layer(inner), streams)
}

#[tokio::test]
async fn the_handles_cost_is_charged_at_end() {
    let count = Count::new();
    let (service, mut streams) = streaming(count.settling(Settlement::AtEnd));
    let response = send(&service, request("alice")).await;
    assert_eq!(
        decision(&response).unwrap().remaining(),
        990,
        "the state when the head is sent"
    );
    let (sender, charge) = streams.recv().await.unwrap();
    assert_eq!(charge.reserved(), 10);
    let mut body = response.into_body();
    for i in 1..=3 {
        sender.send(data("token")).unwrap();
        assert_eq!(
            body.frame().await.unwrap().unwrap().into_data().unwrap(),
            "token"
        );
        charge.add(i * 10);
    }
    drop(charge);
    assert_eq!(count.charged(), 10, "still reserved");
    drop(sender);
    assert!(body.frame().await.is_none());
    assert_eq!(count.charged(), 60);
    drop(body);
    assert_eq!(count.charged(), 60);
}

#[tokio::test]
async fn the_last_handle_settles() {
    for drop_handle_first in [true, false] {
        let count = Count::new();
        let (service, mut streams) = streaming(count.layer().until_body_end());
        let response = send(&service, request("alice")).await;
        let (_sender, charge) = streams.recv().await.unwrap();
        charge.set(3);
        let other = charge.clone();
        drop(charge);
        other.add(1);
        if drop_handle_first {
            drop(other);
            assert_eq!(count.charged(), 10, "the body continues");
            drop(response);
        } else {
            drop(response);
            assert_eq!(count.charged(), 10, "a task continues");
            other.add(3);
            drop(other);
        }
        assert_eq!(count.charged(), if drop_handle_first { 4 } else { 7 });
    }
}

#[tokio::test]
async fn an_unused_handle_keeps_the_reserved_cost() {
    let count = Count::new();
    let (service, mut streams) = streaming(count.settling(Settlement::AtEnd));
    drop(send(&service, request("alice")).await);
    drop(streams.recv().await);
    assert_eq!(count.charged(), 10);
    drop(send(&service, request("alice")).await);
    streams.recv().await.unwrap().1.set(0);
    assert_eq!(count.charged(), 10, "to count nothing is to use it");
}

#[tokio::test]
async fn sent_bytes_are_charged() {
    let per = NonZeroU32::new(10).unwrap();
    for (sent, read, cost) in [(0, 0, 0), (1, 1, 1), (4, 4, 2), (4, 1, 1), (200, 200, 100)] {
        let count = Count::new();
        let (service, mut streams) = streaming(count.settling(Settlement::Bytes { per }));
        let mut body = send(&service, request("alice")).await.into_body();
        let (sender, _) = streams.recv().await.unwrap();
        for _ in 0..sent {
            sender.send(data("token")).unwrap();
        }
        for _ in 0..read {
            body.frame().await.unwrap().unwrap();
        }
        sender
            .send(Ok(Frame::trailers(http::HeaderMap::new())))
            .unwrap();
        drop(body);
        assert_eq!(count.charged(), cost, "{read} of {sent} frames");
    }
}

/// A server sends only the head.
#[tokio::test]
async fn an_unread_body_has_no_bytes() {
    let per = NonZeroU32::MIN;
    let count = Count::new();
    let layer = count.settling(Settlement::Bytes { per });
    let inner = service_fn(async |_: Request<String>| {
        Ok::<_, Infallible>(Response::new("a long text".to_owned()))
    });
    drop(send(&layer.layer(inner), request("alice")).await);
    assert_eq!(count.charged(), 0);
}

#[tokio::test]
async fn handle_costs_are_charged_without_a_response() {
    let count = Count::new();
    for (used, cost) in [(None, 10), (Some(2), 12), (Some(0), 12), (Some(30), 42)] {
        let inner = service_fn(move |request: Request<String>| {
            if let Some(units) = used {
                request
                    .extensions()
                    .get::<RequestCost>()
                    .unwrap()
                    .set(units);
            }
            async { Err::<Response<String>, _>("no response") }
        });
        let mut service = count.settling(Settlement::Refund).layer(inner);
        assert!(service.call(request("alice")).await.is_err());
        assert_eq!(count.charged(), cost, "{used:?}");
    }
}
