use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use crate::error::StoreError;
use crate::limit::Decision;

pin_project! {
    /// The reply of a [`Store`](crate::store::Store) to a check, or a future of it: there is no third
    /// case, so the variants are exhaustive.
    ///
    /// `Answer` is a future itself, so most callers write `store.check(check).await`. A caller that
    /// must store its state before it waits, such as a request, can match on the variants first:
    ///
    /// ```
    /// use tower_redis_ratelimit::check::Check;
    /// use tower_redis_ratelimit::store::{Answer, Store};
    /// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policies = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?.into();
    /// let check = Check::take(Key::new("user-42"), &policies, 1);
    /// let decision = match LocalStore::default().check(check) {
    ///     Answer::Ready { answer } => answer?,
    ///     Answer::Pending { future } => future.await?,
    /// };
    /// assert!(decision.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// As a future, a ready answer may be polled repeatedly and returns the same value. A pending
    /// one behaves like its future.
    #[derive(Debug, Clone)]
    #[must_use = "a check may be withdrawn when its answer is dropped"]
    #[project = AnswerProj]
    #[allow(missing_docs, reason = "the variants document their fields: the macro accepts no docs for them")]
    pub enum Answer<F> {
        /// The answer: a decision or an error.
        Ready {
            answer: Result<Decision, StoreError>,
        },
        /// The check is in progress: the future resolves to the decision or the error.
        Pending {
            #[pin]
            future: F,
        },
    }
}

impl<F> Answer<F> {
    /// A ready answer.
    pub const fn ready(answer: Result<Decision, StoreError>) -> Self {
        Self::Ready { answer }
    }

    /// A pending answer.
    pub const fn pending(future: F) -> Self {
        Self::Pending { future }
    }
}

impl<F: Future<Output = Result<Decision, StoreError>>> Future for Answer<F> {
    type Output = Result<Decision, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            AnswerProj::Ready { answer } => Poll::Ready(answer.clone()),
            AnswerProj::Pending { future } => future.poll(cx),
        }
    }
}
