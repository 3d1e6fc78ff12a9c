//! Several instances over one shared count. Each has its own runtime and clock, and its checks are delayed or lost. A
//! single thread runs everything, determined by a seed.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use fastrand::Rng;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::Leased;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key, Mode, Policies, Source, State};
use crate::observe::{Observer, event};
use crate::store::{Answer, Share, Store};
use crate::util::{Seed, instant, lock};

type Reply = Result<Decision, StoreError>;
type BoxFuture = Pin<Box<dyn Future<Output = Reply> + Send>>;

/// One instance's access to the shared store.
#[derive(Clone)]
pub(in crate::leases) struct Remote(Arc<Mutex<Shared>>);

pub(in crate::leases) struct Shared {
    rng: Rng,
    /// `false` if faults are injected.
    pub(in crate::leases) is_healthy: bool,
    /// Refunds in 40 that are not sent at first, and retried later.
    pub(in crate::leases) rejected_refunds: u8,
    /// Scale of the delays in each direction, in microseconds. Most delays are at most a quarter of
    /// it; with injected faults, a few are up to eight times the scale.
    pub(in crate::leases) delay_scale: i64,
    /// Microseconds of the true time.
    now: i64,
    /// Excess of its clock's speed, in units of 1/1024.
    speed: i64,
    states: HashMap<(Key, u64), Vec<State>>,
    in_transit: Vec<SentCheck>,
    /// Time by its clock and cost of each granted single check.
    pub(in crate::leases) spent: Vec<(i64, u32)>,
    /// Times of resets, by its clock.
    pub(in crate::leases) resets: Vec<i64>,
    pub(in crate::leases) checks: u64,
    /// Total granted to blocks; the next field is the part that was reported to an instance.
    pub(in crate::leases) leased_units: u64,
    pub(in crate::leases) reported_units: u64,
    /// Total of the blocks' refunds that instances have sent; the next field is `true` if one was rejected first.
    pub(in crate::leases) refunded_units: u64,
    pub(in crate::leases) has_unsent_refund: bool,
    /// Whether a reset was requested; it may be lost on its way to the shared store.
    pub(in crate::leases) has_reset: bool,
}

struct SentCheck {
    check: Check,
    decided_at: i64,
    answered_at: i64,
    fate: Fate,
    answer: Option<Reply>,
    to: Option<oneshot::Sender<Reply>>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Delivered,
    /// The check is decided, but the reply is lost.
    ReplyLost,
    /// The check never arrives, and no error is reported.
    CheckLost,
    NotSent,
}

const CLOCK_START: i64 = 1_790_000_000_000_000;

impl Shared {
    fn clock(&self) -> i64 {
        CLOCK_START + self.now * self.speed / 1024
    }

    fn send(&mut self, check: Check) -> oneshot::Receiver<Reply> {
        let (to, answer) = oneshot::channel();
        self.checks += 1;
        self.has_reset |= check.mode() == Mode::Reset;
        let fate = match self.rng.u8(..40) {
            n if check.mode() == Mode::Refund && (3..3 + self.rejected_refunds).contains(&n) => {
                Fate::NotSent
            }
            _ if self.is_healthy => Fate::Delivered,
            0 => Fate::ReplyLost,
            1 => Fate::CheckLost,
            2 => Fate::NotSent,
            _ => Fate::Delivered,
        };
        if check.mode() == Mode::Refund {
            match fate {
                Fate::NotSent => self.has_unsent_refund = true,
                _ => self.refunded_units += u64::from(check.cost()),
            }
        }
        // Usually a short delay, rarely a very long one.
        let mut way = || match self.rng.u8(..12) {
            0 if !self.is_healthy => self.rng.i64(0..=8 * self.delay_scale),
            1 => 0,
            _ => self.rng.i64(0..=self.delay_scale / 4),
        };
        let decided_at = self.now + way();
        let answered_at = decided_at + way();
        self.in_transit.push(SentCheck {
            check,
            decided_at,
            answered_at,
            fate,
            answer: None,
            to: Some(to),
        });
        answer
    }

    /// Decides the checks that have arrived before `until`, and replies.
    fn advance_to(&mut self, until: i64) {
        let mut in_transit = std::mem::take(&mut self.in_transit);
        in_transit.sort_by_key(|check| check.decided_at);
        for check in in_transit
            .iter_mut()
            .filter(|check| check.answer.is_none() && check.decided_at <= until)
        {
            self.now = check.decided_at.max(self.now);
            check.answer = Some(match check.fate {
                Fate::Delivered => Ok(self.decide(check.check.clone())),
                Fate::ReplyLost => {
                    let _ = self.decide(check.check.clone());
                    Err(StoreError::new(ErrorKind::Timeout).check_only())
                }
                Fate::CheckLost => Err(StoreError::new(ErrorKind::Timeout).check_only()),
                Fate::NotSent => Err(StoreError::new(ErrorKind::QueueFull)
                    .check_only()
                    .not_sent()),
            });
        }
        self.now = until;
        for check in in_transit
            .iter_mut()
            .filter(|check| check.answered_at <= until)
        {
            if let (Some(answer), Some(to)) = (check.answer.take(), check.to.take()) {
                let granted = answer
                    .as_ref()
                    .map_or(0, |decision| decision.granted().into());
                if to.send(answer).is_ok() && check.check.mode() == Mode::UpTo {
                    self.reported_units += granted;
                }
            }
        }
        in_transit.retain(|check| check.to.is_some());
        self.in_transit = in_transit;
    }

    fn decide(&mut self, check: Check) -> Decision {
        let now = self.clock();
        let check = check.at_redis(now);
        let fresh = || {
            check
                .policies()
                .iter()
                .map(|policy| State::fresh(policy.kind()))
                .collect()
        };
        let states = self
            .states
            .entry((*check.key(), check.policies().id()))
            .or_insert_with(fresh);
        let verdicts = check.decide(states, now);
        if check.mode() == Mode::Take && verdicts.granted > 0 {
            self.spent.push((now, check.cost()));
        } else if check.mode() == Mode::UpTo {
            self.leased_units += verdicts.granted as u64;
        } else if check.mode() == Mode::Reset {
            self.resets.push(now);
        }
        check.answer(verdicts, Source::Redis).decided_at(now)
    }
}

impl Store for Remote {
    type Future = BoxFuture;

    fn check(&self, check: Check) -> Answer<BoxFuture> {
        let answer = lock(&self.0).send(check);
        Answer::pending(Box::pin(async {
            answer
                .await
                .unwrap_or_else(|_| Err(StoreError::new(ErrorKind::Timeout).check_only()))
        }))
    }
}

/// Totals of the blocks' units.
#[derive(Debug, Default)]
pub(in crate::leases) struct Blocks {
    pub(in crate::leases) ended: AtomicU64,
    pub(in crate::leases) charged: AtomicU64,
    pub(in crate::leases) refunded: AtomicU64,
    pub(in crate::leases) expired: AtomicU64,
    pub(in crate::leases) lost: AtomicU64,
}

impl Observer for Arc<Blocks> {
    fn leased(&self, event: &event::Leased) {
        assert!(event.refunded + event.expired <= event.charged, "{event:?}");
        self.lost.fetch_add(event.lost, Relaxed);
        self.ended.fetch_add((event.charged > 0).into(), Relaxed);
        self.charged.fetch_add(event.charged, Relaxed);
        self.refunded.fetch_add(event.refunded, Relaxed);
        self.expired.fetch_add(event.expired, Relaxed);
    }
}

/// A simulated process.
pub(in crate::leases) struct Instance {
    pub(in crate::leases) store: Leased<Remote>,
    runtime: Option<Runtime>,
    /// Its start in true time.
    began: i64,
    /// Excess of its clock's speed, in units of 1/1024.
    speed: i64,
    /// Progress of its runtime's clock.
    runtime_time: Duration,
    waiting: Vec<BoxFuture>,
    /// Time at which a stopped instance continues.
    pub(in crate::leases) stopped_until: i64,
}

pub(in crate::leases) struct World {
    seed: Seed,
    /// Start of all processes, by their own clocks.
    start: Instant,
    pub(in crate::leases) rng: Rng,
    pub(in crate::leases) remote: Remote,
    pub(in crate::leases) instances: Vec<Instance>,
    pub(in crate::leases) blocks: Arc<Blocks>,
    pub(in crate::leases) now: i64,
    /// Killed instances keep their blocks but do nothing.
    pub(in crate::leases) killed: Vec<Instance>,
    /// Time by the shared clock and cost of each grant from memory to a waiting check.
    pub(in crate::leases) from_memory: Vec<(i64, u32)>,
    /// Whether an instance was shut down.
    pub(in crate::leases) is_ended: bool,
}

impl World {
    pub(in crate::leases) fn new(seed: u64, instances: u32) -> Self {
        let mut rng = Rng::with_seed(seed);
        let shared = Shared {
            rng: rng.fork(),
            is_healthy: false,
            rejected_refunds: 0,
            delay_scale: rng.i64(100..20_000),
            now: 0,
            speed: rng.i64(1024 - 64..=1024 + 64),
            states: HashMap::new(),
            in_transit: vec![],
            spent: vec![],
            resets: vec![],
            checks: 0,
            leased_units: 0,
            reported_units: 0,
            refunded_units: 0,
            has_unsent_refund: false,
            has_reset: false,
        };
        let start = instant();
        let seed = Seed::set(seed, Duration::from_micros(CLOCK_START as u64));
        let remote = Remote(Arc::new(Mutex::new(shared)));
        let mut world = Self {
            seed,
            start,
            rng,
            remote,
            instances: vec![],
            blocks: Arc::default(),
            now: 0,
            killed: vec![],
            from_memory: vec![],
            is_ended: false,
        };
        for _ in 0..instances {
            let instance = world.new_instance(instances);
            world.instances.push(instance);
        }
        world
    }

    pub(in crate::leases) fn shared<T>(&self, read: impl FnOnce(&mut Shared) -> T) -> T {
        read(&mut lock(&self.remote.0))
    }

    fn new_instance(&mut self, of: u32) -> Instance {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        self.seed.set_now(self.start);
        let store = Leased::new(self.remote.clone()).share(Share::Fixed(of.try_into().unwrap()));
        store
            .backend()
            .observe(&(Arc::new(Arc::clone(&self.blocks)) as Arc<dyn Observer>));
        let speed = self.rng.i64(1024 - 64..=1024 + 64);
        let (began, runtime_time) = (self.now, Duration::ZERO);
        Instance {
            store,
            runtime: Some(runtime),
            began,
            speed,
            runtime_time,
            waiting: vec![],
            stopped_until: 0,
        }
    }

    /// The time by the shared store's clock.
    pub(in crate::leases) fn clock(&self) -> i64 {
        self.shared(|shared| shared.clock())
    }

    /// Maximum duration of a round trip.
    pub(in crate::leases) fn max_round_trip(&self) -> i64 {
        self.shared(|shared| 16 * shared.delay_scale)
    }

    /// Advances the true time and all clocks.
    pub(in crate::leases) fn advance(&mut self, time: i64) {
        self.now += time;
        let now = self.now;
        self.shared(|shared| shared.advance_to(now));
    }

    fn elapsed(&self, i: usize) -> Duration {
        let Instance { began, speed, .. } = self.instances[i];
        Duration::from_micros(((self.now - began) * speed / 1024) as u64)
    }

    /// Lets an instance act before any of its timers has run.
    pub(in crate::leases) fn act_as<T>(
        &mut self,
        i: usize,
        act: impl FnOnce(&mut Instance) -> T,
    ) -> T {
        self.seed.set_now(self.start + self.elapsed(i));
        let instance = &mut self.instances[i];
        let handle = instance
            .runtime
            .as_ref()
            .map(|runtime| runtime.handle().clone());
        let _runtime = handle.as_ref().map(|handle| handle.enter());
        act(instance)
    }

    /// Sends a check. Returns its decision if it is immediate.
    pub(in crate::leases) fn take(
        &mut self,
        i: usize,
        key: Key,
        policies: &Policies,
        cost: u32,
    ) -> Option<Decision> {
        self.act_as(i, |instance| {
            match instance.store.check(Check::take(key, policies, cost)) {
                Answer::Ready { answer } => Some(answer.unwrap()),
                Answer::Pending { future } => {
                    instance.waiting.push(Box::pin(future));
                    None
                }
            }
        })
    }

    /// Runs all due tasks of an instance. Returns the answered checks.
    pub(in crate::leases) fn run(&mut self, i: usize) -> Vec<Reply> {
        let elapsed = self.elapsed(i);
        self.seed.set_now(self.start + elapsed);
        let instance = &mut self.instances[i];
        let pass = elapsed.saturating_sub(instance.runtime_time);
        instance.runtime_time = elapsed;
        let Some(runtime) = &instance.runtime else {
            return vec![];
        };
        runtime.block_on(async {
            tokio::time::advance(pass).await;
            for _ in 0..12 {
                tokio::task::yield_now().await;
            }
        });
        let mut answers = vec![];
        let mut cx = Context::from_waker(Waker::noop());
        instance
            .waiting
            .retain_mut(|future| match future.as_mut().poll(&mut cx) {
                std::task::Poll::Ready(answer) => {
                    answers.push(answer);
                    false
                }
                std::task::Poll::Pending => true,
            });
        let now = self.clock();
        let leased = answers
            .iter()
            .flatten()
            .filter(|decision| decision.source() == Source::Leased);
        self.from_memory
            .extend(leased.map(|decision| (now, decision.granted())));
        answers
    }

    /// Sends a check of an instance without awaiting the reply.
    pub(in crate::leases) fn send(&mut self, i: usize, check: Check) {
        let refunded_units = self.shared(|shared| shared.refunded_units);
        self.act_as(i, |instance| drop(instance.store.check(check)));
        // This refund was not of a block.
        self.shared(|shared| shared.refunded_units = refunded_units);
    }

    /// An instance that may assume a wrong number of instances.
    fn uninformed_instance(&mut self) -> Instance {
        let of = self.rng.u32(1..=6);
        self.new_instance(of)
    }

    /// Starts another instance.
    pub(in crate::leases) fn start_another(&mut self) {
        let next = self.uninformed_instance();
        self.instances.push(next);
    }

    /// Replaces an instance, which is killed.
    pub(in crate::leases) fn kill(&mut self, i: usize) {
        let next = self.uninformed_instance();
        let killed = std::mem::replace(&mut self.instances[i], next);
        self.killed.push(killed);
    }

    /// Replaces an instance, which is shut down in order.
    pub(in crate::leases) fn shut_down(&mut self, i: usize) {
        let now = self.start + self.elapsed(i);
        self.is_ended = true;
        let next = self.uninformed_instance();
        let Instance { store, runtime, .. } = std::mem::replace(&mut self.instances[i], next);
        self.seed.set_now(now);
        if let Some(runtime) = runtime {
            let mut end = Box::pin(async move { store.shutdown().await });
            runtime.block_on(async {
                let _ = end.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            });
            drop(end);
            drop(runtime);
        }
    }
}
