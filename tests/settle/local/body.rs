//! The response body passes on the inner service's body unchanged.

use http::HeaderMap;
use http_body_util::{BodyExt, Empty, Full};

use super::*;

async fn tracked<B: From<String> + Send + 'static>(count: &Count, body: B) -> TrackedBody<B> {
    let body = Arc::new(Mutex::new(Some(body)));
    let inner = move |_: Request<String>| {
        let response = Response::new(body.lock().unwrap().take().unwrap());
        async { Ok::<_, Infallible>(response) }
    };
    let mut service = count.layer().until_body_end().layer(service_fn(inner));
    service.call(request("alice")).await.unwrap().into_body()
}

#[tokio::test]
async fn sizes_and_ends_pass_through() {
    let count = Count::new();
    let full = tracked(&count, Any(Full::new(Bytes::from_static(b"hello")))).await;
    assert_eq!(
        (full.size_hint().exact(), full.is_end_stream()),
        (Some(5), false)
    );
    let empty = tracked(&count, Any(Empty::<Bytes>::new())).await;
    assert_eq!(
        (empty.size_hint().exact(), empty.is_end_stream()),
        (Some(0), true)
    );
}

#[tokio::test]
async fn data_trailers_and_errors_pass_through() {
    let count = Count::new();
    let (sender, body) = frames();
    let mut body = tracked(&count, body).await;
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", 0.into());
    sender.send(data("hello")).unwrap();
    sender.send(Ok(Frame::trailers(trailers.clone()))).unwrap();
    assert_eq!(
        body.frame().await.unwrap().unwrap().into_data().unwrap(),
        "hello"
    );
    assert_eq!(
        body.frame()
            .await
            .unwrap()
            .unwrap()
            .into_trailers()
            .unwrap(),
        trailers
    );
    let (sender, body) = frames();
    let mut body = tracked(&count, body).await;
    sender.send(Err("broken")).unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap_err(), "broken");
}

/// A server may keep a body after its end.
#[tokio::test]
async fn settles_with_last_frame_or_error() {
    for ends_well in [true, false] {
        let count = Count::new();
        let inner = service_fn(move |request: Request<String>| {
            request.extensions().get::<RequestCost>().unwrap().set(3);
            let (sender, body) = frames();
            sender
                .send(if ends_well {
                    data("hello")
                } else {
                    Err("broken")
                })
                .unwrap();
            async { Ok::<_, Infallible>(Response::new(body)) }
        });
        let mut service = count.layer().until_body_end().layer(inner);
        let mut body = service.call(request("alice")).await.unwrap().into_body();
        assert_eq!(body.frame().await.unwrap().is_ok(), ends_well);
        if ends_well {
            assert_eq!(count.charged(), 10);
            assert!(body.frame().await.is_none());
        }
        assert_eq!(count.charged(), 3);
    }
    let count = Count::new();
    let mut body = tracked(&count, Any(Full::new(Bytes::from_static(b"hello")))).await;
    let _ = body.frame().await;
    assert!(body.is_end_stream());
}
