//! Settlement of a request's cost.

mod at_end;
mod at_head;
mod body;
mod endings;
mod more;
mod reservations;
mod together;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::{FutureExt, Stream, stream};
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::StreamBody;
use tokio::sync::mpsc;
use tower::{Layer, Service, service_fn};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::rate_limit::{TrackedBody, UntilBodyEnd};
use tower_redis_ratelimit::reject::HttpReject;
use tower_redis_ratelimit::settle::{RequestCost, Settlement};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, LocalStore, Policy, RateLimitLayer, Strategy};

use crate::mocks::*;

/// Creates a policy whose charges do not expire during a test.
pub(crate) fn quota(name: &str, quota: &str) -> Policy {
    Policy::new(name, Strategy::FixedWindow(Align::FirstHit), quota).unwrap()
}

/// Returns the units that a caller was charged, of 1,000.
pub(crate) fn charged(store: &LocalStore, key: Key, policy: &Policy) -> u32 {
    let check = Check::peek(key, &policy.clone().into(), 0);
    policy.quota().capacity()
        - store
            .check(check)
            .now_or_never()
            .unwrap()
            .unwrap()
            .remaining()
}

/// A layer with one key for all requests, under 1,000 units, and its count.
pub(crate) struct Count {
    pub(crate) store: LocalStore,
    pub(crate) policy: Policy,
}

impl Count {
    pub(crate) fn new() -> Self {
        Self {
            store: LocalStore::default(),
            policy: quota("test", "1000/d"),
        }
    }

    /// Creates a layer whose requests reserve 10.
    pub(crate) fn layer(&self) -> RateLimitLayer<LocalStore, Global> {
        RateLimitLayer::new(self.store.clone(), Global, self.policy.clone())
            .cost(|_| 10)
            .decision_in_response()
    }

    pub(crate) fn settling(
        &self,
        settlement: Settlement,
    ) -> RateLimitLayer<LocalStore, Global, HttpReject, UntilBodyEnd> {
        self.layer().settle(move |_| settlement)
    }

    pub(crate) fn charged(&self) -> u32 {
        charged(&self.store, Key::GLOBAL, &self.policy)
    }
}

/// A body of the test, which a rejection can create.
pub(crate) struct Any<B>(pub(crate) B);

impl<B> From<String> for Any<B> {
    fn from(_: String) -> Self {
        panic!("nothing is rejected")
    }
}

impl<B: Body + Unpin> Body for Any<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

/// A response body with frames that the test sends.
pub(crate) type Frames = Any<StreamBody<Pin<Box<dyn Stream<Item = Received> + Send>>>>;

pub(crate) type Received = Result<Frame<Bytes>, &'static str>;

pub(crate) type Sender = mpsc::UnboundedSender<Received>;

pub(crate) fn frames() -> (Sender, Frames) {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    (
        sender,
        Any(StreamBody::new(Box::pin(stream::poll_fn(move |cx| {
            receiver.poll_recv(cx)
        })))),
    )
}

pub(crate) fn data(text: &str) -> Received {
    Ok(Frame::data(Bytes::copy_from_slice(text.as_bytes())))
}

/// Collects the charge of each request.
pub(crate) type Handles = Arc<Mutex<Vec<RequestCost>>>;
