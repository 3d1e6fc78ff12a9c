//! Settlement by the head of the response.

use super::*;

/// Responds with the status in the request's path, and with the request's header fields.
async fn answer(request: Request<String>) -> Result<Response<String>, Infallible> {
    let mut response = Response::new("answer".to_owned());
    *response.status_mut() = request.uri().path()[1..].parse().unwrap();
    if let Some(tokens) = request.headers().get("x-tokens") {
        response.headers_mut().insert("x-tokens", tokens.clone());
    }
    response.extensions_mut().insert(Tokens(77));
    Ok(response)
}

#[derive(Clone)]
struct Tokens(u32);

fn with_status(status: u16) -> Request<String> {
    Request::builder()
        .uri(format!("/{status}"))
        .body(String::new())
        .unwrap()
}

#[tokio::test]
async fn only_failures_count() {
    let count = Count::new();
    let layer = count.layer().settle(|response| match response.status {
        StatusCode::UNAUTHORIZED => Settlement::Keep,
        _ => Settlement::Refund,
    });
    let service = layer.layer(service_fn(answer));
    for (status, charged) in [(200, 0), (401, 10), (200, 10), (500, 10), (401, 20)] {
        let response = send(&service, with_status(status)).await;
        assert_eq!(
            (response.status().as_u16(), count.charged()),
            (status, charged)
        );
        let decided = decision(&response).unwrap();
        assert_eq!(
            decided.remaining(),
            1_000 - charged,
            "the state when the head is sent"
        );
        assert_eq!(
            field(&response, "ratelimit").unwrap().split(';').nth(1),
            Some(&*format!("r={}", 1_000 - charged))
        );
    }
}

#[tokio::test]
async fn the_real_cost_replaces_the_reserved_one() {
    for (tokens, charged) in [
        (None, 10),
        (Some(0), 0),
        (Some(4), 4),
        (Some(10), 10),
        (Some(300), 300),
        (Some(9_999), 2_000),
    ] {
        let count = Count::new();
        let layer = count.layer().settle(|response| {
            let tokens = response
                .headers
                .get("x-tokens")
                .map(|tokens| tokens.to_str().unwrap().parse().unwrap());
            tokens.map_or(Settlement::Keep, Settlement::Cost)
        });
        let mut request = with_status(200);
        if let Some(tokens) = tokens {
            request.headers_mut().insert("x-tokens", u32::into(tokens));
        }
        let response = send(&layer.layer(service_fn(answer)), request).await;
        let decided = decision(&response).unwrap();
        assert_eq!(
            decided.remaining(),
            1_000_u32.saturating_sub(charged),
            "{tokens:?}"
        );
        let limit = charge_left(&count);
        assert_eq!(limit, i64::from(1_000) - i64::from(charged), "{tokens:?}");
    }
}

/// Returns the remaining units, negative for a debt.
fn charge_left(count: &Count) -> i64 {
    let back = |cost| Check::refund(Key::GLOBAL, &count.policy.clone().into(), cost);
    let all = count
        .store
        .check(back(u32::MAX))
        .now_or_never()
        .unwrap()
        .unwrap();
    1_000 - i64::from(all.granted())
}

#[tokio::test]
async fn an_extension_of_the_handler_settles_too() {
    let count = Count::new();
    let layer = count
        .layer()
        .settle(|response| Settlement::Cost(response.extensions.get::<Tokens>().unwrap().0));
    send(&layer.layer(service_fn(answer)), with_status(200)).await;
    assert_eq!(count.charged(), 77);
}

#[tokio::test]
async fn settles_at_head_despite_body_and_handle() {
    for (settlement, cost) in [
        (Settlement::Keep, 10),
        (Settlement::Refund, 0),
        (Settlement::Cost(70), 70),
    ] {
        let count = Count::new();
        let handles = Handles::default();
        let kept = Arc::clone(&handles);
        let service =
            count
                .settling(settlement)
                .layer(service_fn(move |request: Request<String>| {
                    let charge = request.extensions().get::<RequestCost>().unwrap().clone();
                    charge.add(500);
                    kept.lock().unwrap().push(charge);
                    async { Ok::<_, Infallible>(Response::new(String::new())) }
                }));
        let response = send(&service, request("alice")).await;
        assert_eq!(count.charged(), cost, "{settlement:?}");
        drop(response);
        handles.lock().unwrap().clear();
        assert_eq!(count.charged(), cost, "{settlement:?}");
    }
}

/// Each try reserves its failure: 100 concurrent requests get no more tries.
#[tokio::test]
async fn parallel_guesses_get_no_more_tries() {
    let policy = quota("login", "5/h");
    let store = LocalStore::default();
    let tries = Arc::new(Mutex::new(0));
    let layer =
        RateLimitLayer::new(store.clone(), Global, policy.clone()).settle(
            |response| match response.status {
                StatusCode::UNAUTHORIZED => Settlement::Keep,
                _ => Settlement::Refund,
            },
        );
    let counted = Arc::clone(&tries);
    let service = layer.layer(service_fn(move |request: Request<String>| {
        *counted.lock().unwrap() += 1;
        async {
            tokio::task::yield_now().await;
            answer(request).await
        }
    }));
    let guess = |status| {
        let service = service.clone();
        async move { send(&service, with_status(status)).await.status().as_u16() }
    };
    // Correct guesses use no try.
    for _ in 0..20 {
        assert_eq!(guess(200).await, 200);
    }
    *tries.lock().unwrap() = 0;
    let all = futures_util::future::join_all((0..100).map(|_| guess(401))).await;
    assert_eq!(all.iter().filter(|status| **status == 401).count(), 5);
    assert_eq!(all.iter().filter(|status| **status == 429).count(), 95);
    assert_eq!(*tries.lock().unwrap(), 5);
    assert_eq!(guess(200).await, 429, "the right one comes too late");
    assert_eq!(charged(&store, Key::GLOBAL, &policy), 5);
}

/// The store cannot decide, and the layer admits requests on errors.
#[tokio::test]
async fn uncounted_requests_have_an_inert_handle() {
    let count = Count::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&seen);
    let inner = service_fn(move |request: Request<String>| {
        let charge = request
            .extensions()
            .get::<RequestCost>()
            .expect("a handle")
            .clone();
        charge.add(5);
        kept.lock().unwrap().push(charge.reserved());
        async { Ok::<_, Infallible>(Response::new(String::new())) }
    });
    let layer = count
        .settling(Settlement::Refund)
        .skip(|request| request.uri.path() == "/books");
    assert!(decision(&send(&layer.layer(inner.clone()), request("alice")).await).is_none());
    let broken = RateLimitLayer::new(Broken, Global, count.policy.clone())
        .on_error(tower_redis_ratelimit::reject::OnError::Allow)
        .settle(|_| Settlement::Cost(3));
    send(&broken.layer(inner), request("alice")).await;
    assert_eq!((count.charged(), &**seen.lock().unwrap()), (0, &[0, 0][..]));
}

#[tokio::test]
async fn rejections_are_not_settled() {
    let count = Count::new();
    let layer = count
        .layer()
        .cost(|_| 600)
        .settle(|_| Settlement::Cost(500));
    let service = layer.layer(service_fn(answer));
    let statuses = [
        send(&service, with_status(200)).await,
        send(&service, with_status(200)).await,
    ];
    assert_eq!(
        statuses.map(|response| response.status().as_u16()),
        [200, 429]
    );
    assert_eq!(count.charged(), 500);
}
