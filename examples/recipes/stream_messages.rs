//! Each message of a stream.

use std::time::Duration;

use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use tokio::time::Instant;
use tonic::{Code, Status};
use tower_redis_ratelimit::reject::Reason;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};

/// Lets each message wait for a permit, and ends a stream whose wait would be longer than 5 s.
pub(crate) fn paced<S: Store, T>(
    limiter: Limiter<S>,
    key: Key,
    messages: impl Stream<Item = Result<T, Status>>,
) -> impl Stream<Item = Result<T, Status>> {
    messages.and_then(move |message| {
        let limiter = limiter.clone();
        async move {
            let decision = limiter.wait(key, 1, Duration::from_secs(5)).await;
            let decision = decision.map_err(|error| Status::from(Reason::Unavailable(&error)))?;
            if decision.is_allowed() {
                Ok(message)
            } else {
                Err(Reason::Denied(&decision).into())
            }
        }
    })
}

#[tokio::test(start_paused = true)]
async fn each_message_is_counted() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = |quota| {
        Ok::<_, Box<dyn std::error::Error>>(Limiter::new(
            LocalStore::default(),
            Policy::new("messages", Strategy::Gcra, quota)?,
        ))
    };
    // In a method of a tonic service, this stream is a `tonic::Streaming`.
    let messages = || stream::iter(["a", "b", "c"].map(Ok::<_, Status>));
    let (user, start) = (Key::new("user-42"), Instant::now());

    let answers: Vec<&str> = paced(limiter(Quota::per_second(1))?, user, messages())
        .try_collect()
        .await?;
    assert_eq!(
        (answers, start.elapsed().as_secs()),
        (vec!["a", "b", "c"], 2)
    );

    let answers: Vec<_> = paced(limiter(Quota::per_minute(2))?, user, messages())
        .collect()
        .await;
    let codes: Vec<_> = answers
        .iter()
        .map(|answer| answer.as_ref().map_err(Status::code))
        .collect();
    assert_eq!(
        codes[..3],
        [Ok(&"a"), Ok(&"b"), Err(Code::ResourceExhausted)]
    );
    Ok(())
}
