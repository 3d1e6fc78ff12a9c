//! The interface of a compared limiter.

use std::fmt::Debug;
use std::time::Duration;

use benches::cases::{HEADER, address};
use benches::meter::{Amount, Measure};
use benches::support::RedisServer;
use futures_util::future::BoxFuture;
use http::{Request, Response, StatusCode};
use tower::{Service, ServiceExt};
use tower_redis_ratelimit::Quota;

use crate::exact;
use crate::outage::{self, Fault, Outage};
use crate::speed::{self, Load};

/// A limiter with some of its settings.
pub trait Peer: Copy + Send + Sync + 'static {
    fn name(&self) -> &'static str;

    /// The Redis that it needs, with more arguments.
    fn server(&self, args: &[&str]) -> RedisServer {
        RedisServer::start_with(args)
    }

    /// Returns `true` if it supports this load.
    fn can(&self, load: Load) -> bool {
        load != Load::TenLimits
    }

    /// Another instance, with separate connections.
    fn instance(&self, setup: Setup<'_>) -> impl Future<Output = impl Instance> + Send;
}

/// The settings of an instance.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub server: &'a RedisServer,
    pub quota: Quota,
    /// How many limits apply to each request, all of the same period.
    pub limits: u32,
    /// How many instances there are.
    pub instances: u32,
    /// How long a request may wait for Redis, where that can be set.
    pub deadline: Duration,
}

/// With a reachable Redis: long, so that no limiter decides locally on a busy machine.
pub const PATIENT: Duration = Duration::from_secs(3);

pub trait Instance: Clone + Send + Sync + 'static {
    fn ask(&mut self, caller: u32) -> impl Future<Output = Answer> + Send;
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Answer {
    Passed,
    Denied,
    /// Neither: the limiter could not decide.
    Failed,
}

impl Answer {
    /// The decision of a library without a layer.
    pub fn of<E>(passes: Result<bool, E>) -> Self {
        match passes {
            Ok(true) => Self::Passed,
            Ok(false) => Self::Denied,
            Err(_) => Self::Failed,
        }
    }
}

/// A service with a layer, and the way to pass the caller.
#[derive(Clone)]
pub struct Layered<S>(pub S, pub fn(u32) -> Request<()>);

impl<S, B> Instance for Layered<S>
where
    S: Service<Request<()>, Response = Response<B>, Error: Debug, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    async fn ask(&mut self, caller: u32) -> Answer {
        let request = self.1(caller);
        match self
            .0
            .ready()
            .await
            .unwrap()
            .call(request)
            .await
            .unwrap()
            .status()
        {
            StatusCode::OK => Answer::Passed,
            StatusCode::TOO_MANY_REQUESTS => Answer::Denied,
            _ => Answer::Failed,
        }
    }
}

/// A caller as layers know it that read a header field.
pub fn by_header(caller: u32) -> Request<()> {
    Request::builder()
        .header(HEADER, name_of(caller))
        .body(())
        .unwrap()
}

/// A caller as libraries know it.
pub fn name_of(caller: u32) -> String {
    address(caller).to_string()
}

/// A peer of any type.
pub trait Measured: Sync {
    fn name(&self) -> &'static str;
    fn server(&self, args: &[&str]) -> RedisServer;
    fn can(&self, load: Load) -> bool;
    fn speed<'a>(
        &'a self,
        server: &'a RedisServer,
        load: Load,
        tasks: u64,
        amount: Amount,
    ) -> BoxFuture<'a, Measure>;
    fn outage(&self, fault: Fault) -> BoxFuture<'_, Outage>;
    fn exact(&self, instances: u32) -> BoxFuture<'_, u64>;
}

impl<P: Peer> Measured for P {
    fn name(&self) -> &'static str {
        Peer::name(self)
    }

    fn server(&self, args: &[&str]) -> RedisServer {
        Peer::server(self, args)
    }

    fn can(&self, load: Load) -> bool {
        Peer::can(self, load)
    }

    fn speed<'a>(
        &'a self,
        server: &'a RedisServer,
        load: Load,
        tasks: u64,
        amount: Amount,
    ) -> BoxFuture<'a, Measure> {
        Box::pin(speed::measure(*self, server, load, tasks, amount))
    }

    fn outage(&self, fault: Fault) -> BoxFuture<'_, Outage> {
        Box::pin(outage::run(*self, fault))
    }

    fn exact(&self, instances: u32) -> BoxFuture<'_, u64> {
        Box::pin(exact::granted(*self, instances))
    }
}
