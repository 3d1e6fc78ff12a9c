use std::any::type_name;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use super::{Answer, Backend, Health, JointFuture, Store, Withdraw};
use crate::error::StoreError;
use crate::limit::{Check, Decision, JointCheck};

/// A store of a type that is chosen at run time, such as your own store or a [`RedisStore`](crate::RedisStore).
///
/// A pending check costs an allocation. Everything else is that of the inner store: a [`Fallback`](crate::Fallback) around
/// it withdraws checks, and layers wake its waiters. Clones share the counts.
///
/// ```
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::store::{BoxStore, MockStore};
/// use tower_redis_ratelimit::{LocalStore, Policy, RateLimitLayer, Strategy};
///
/// let is_test = true;
/// let store = if is_test { BoxStore::new(MockStore::new()) } else { BoxStore::new(LocalStore::default()) };
/// let layer: RateLimitLayer<BoxStore, Global> =
///     RateLimitLayer::new(store, Global, Policy::new("api", Strategy::Gcra, "50/s")?);
/// # let _ = layer;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// For one of the crate's stores, an [`AnyStore`](super::AnyStore) does without the allocation.
#[derive(Clone)]
pub struct BoxStore(Arc<dyn DynStore>);

/// The methods of a [`Store`] with boxed futures.
trait DynStore: Send + Sync {
    fn check(&self, check: Check) -> Answer<BoxStoreFuture>;

    fn check_all(&self, joint: JointCheck) -> JointFuture;

    /// Returns the hooks, without the withdrawal of futures.
    fn backend(&self) -> Backend<'_, BoxStoreFuture>;

    fn health(&self) -> Health;

    fn flush(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>>;

    fn type_name(&self) -> &'static str;
}

/// Resolves to the reply of a [`BoxStore`].
pub struct BoxStoreFuture(Pin<Box<dyn DynCheck>>);

/// A check that can be withdrawn from its store.
trait DynCheck: Future<Output = Result<Decision, StoreError>> + Send {
    fn withdraw(self: Pin<&mut Self>) -> bool;
}

pin_project! {
    struct PendingCheck<S: Store> {
        store: S,
        #[pin]
        future: S::Future,
    }
}

impl BoxStore {
    /// Boxes a store.
    pub fn new(store: impl Store) -> Self {
        Self(Arc::new(store))
    }
}

impl Store for BoxStore {
    type Future = BoxStoreFuture;

    fn check(&self, check: Check) -> Answer<BoxStoreFuture> {
        self.0.check(check)
    }

    fn check_all(&self, joint: JointCheck) -> JointFuture {
        self.0.check_all(joint)
    }

    fn backend(&self) -> Backend<'_, BoxStoreFuture> {
        self.0.backend().withdrawing(self)
    }

    fn health(&self) -> Health {
        self.0.health()
    }

    fn flush(&self) -> impl Future<Output = bool> + Send {
        self.0.flush()
    }
}

impl Withdraw<BoxStoreFuture> for BoxStore {
    fn withdraw(&self, future: Pin<&mut BoxStoreFuture>) -> bool {
        future.get_mut().0.as_mut().withdraw()
    }
}

impl<S: Store> DynStore for S {
    fn check(&self, check: Check) -> Answer<BoxStoreFuture> {
        match Store::check(self, check) {
            Answer::Ready { answer } => Answer::ready(answer),
            Answer::Pending { future } => {
                let store = self.clone();
                Answer::pending(BoxStoreFuture(Box::pin(PendingCheck { store, future })))
            }
        }
    }

    fn check_all(&self, joint: JointCheck) -> JointFuture {
        Store::check_all(self, joint)
    }

    fn backend(&self) -> Backend<'_, BoxStoreFuture> {
        Store::backend(self).of_other_future()
    }

    fn health(&self) -> Health {
        Store::health(self)
    }

    fn flush(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(Store::flush(self))
    }

    fn type_name(&self) -> &'static str {
        type_name::<S>()
    }
}

impl<S: Store> Future for PendingCheck<S> {
    type Output = Result<Decision, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().future.poll(cx)
    }
}

impl<S: Store> DynCheck for PendingCheck<S> {
    fn withdraw(self: Pin<&mut Self>) -> bool {
        let this = self.project();
        Store::backend(this.store).withdraw(this.future)
    }
}

impl Future for BoxStoreFuture {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for BoxStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A store need not implement `Debug`.
        write!(f, "BoxStore({})", self.0.type_name())
    }
}

impl fmt::Debug for BoxStoreFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoxStoreFuture").finish_non_exhaustive()
    }
}
