//! Several instances over one shared count. Each has its own runtime and clock, and its checks are delayed or lost. A
//! single thread runs everything, determined by a seed.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use fastrand::Rng;
use tokio::runtime::Runtime;
use tokio::time::Instant;

use crate::Leased;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key, Mode, Policies, Source, Verdicts};
use crate::observe::{Event, Observer};
use crate::simulation::clocked::Clocked;
use crate::simulation::network::{Counts, Fate, Network, Remote, Reply, Request, Shared, Waiting};
use crate::store::{Answer, Store};
use crate::util::{Seed, instant};

/// The shared store, and the network of all instances to it. Its time is in microseconds.
pub(crate) struct Redis {
    network: Network,
    rng: Rng,
    /// `false` if faults are injected.
    pub(crate) is_healthy: bool,
    /// Refunds in 40 that are not sent at first, and retried later.
    pub(crate) rejected_refunds: u8,
    /// Scale of the delays in each direction, in microseconds. Most delays are at most a quarter of
    /// it; with injected faults, a few are up to eight times the scale.
    pub(crate) delay_scale: u64,
    /// Excess of its clock's speed, in units of 1/1024.
    speed: i64,
    counts: Counts,
    /// Time by its clock and cost of each granted single check.
    pub(crate) spent: Vec<(i64, u32)>,
    /// Times of resets, by its clock.
    pub(crate) resets: Vec<i64>,
    pub(crate) checks: u64,
    /// Total granted to blocks; the next field is the part that was reported to an instance.
    pub(crate) leased_units: u64,
    pub(crate) reported_units: u64,
    /// Total of the blocks' refunds that instances have sent; the next field is `true` if one was rejected first.
    pub(crate) refunded_units: u64,
    pub(crate) has_unsent_refund: bool,
    /// Whether a reset was requested; it may be lost on its way to the shared store.
    pub(crate) has_reset: bool,
}

const CLOCK_START: i64 = 1_790_000_000_000_000;

impl Redis {
    fn clock(&self) -> i64 {
        CLOCK_START + self.network.now as i64 * self.speed / 1024
    }

    fn send(&mut self, check: Check) -> Waiting {
        self.checks += 1;
        self.has_reset |= check.mode() == Mode::Reset;
        let timeout = || StoreError::new(ErrorKind::Timeout).check_only();
        let not_sent = || {
            StoreError::new(ErrorKind::QueueFull)
                .check_only()
                .not_sent()
        };
        let (runs, error) = match self.rng.u8(..40) {
            n if check.mode() == Mode::Refund && (3..3 + self.rejected_refunds).contains(&n) => {
                (false, Some(not_sent()))
            }
            _ if self.is_healthy => (true, None),
            0 => (true, Some(timeout())),
            1 => (false, Some(timeout())),
            2 => (false, Some(not_sent())),
            _ => (true, None),
        };
        if check.mode() == Mode::Refund {
            match error.as_ref().is_some_and(StoreError::is_not_sent) {
                true => self.has_unsent_refund = true,
                false => self.refunded_units += u64::from(check.cost()),
            }
        }
        // Usually a short delay, rarely a very long one.
        let mut way = || match self.rng.u8(..12) {
            0 if !self.is_healthy => self.rng.u64(0..=8 * self.delay_scale),
            1 => 0,
            _ => self.rng.u64(0..=self.delay_scale / 4),
        };
        let fate = Fate {
            queued: 0,
            sent: way(),
            runs,
            back: way(),
            error,
        };
        self.network.send(0, check, fate)
    }
}

impl Remote for Redis {
    fn network(&mut self) -> &mut Network {
        &mut self.network
    }

    fn runs(&mut self, Request { check, .. }: &Request) -> Decision {
        let now = self.clock();
        let verdicts = Verdicts {
            at: now,
            ..self.counts.decide(check, now)
        };
        if check.mode() == Mode::Take && verdicts.granted > 0 {
            self.spent.push((now, check.cost()));
        } else if check.mode() == Mode::UpTo {
            self.leased_units += verdicts.granted as u64;
        } else if check.mode() == Mode::Reset {
            self.resets.push(now);
        }
        check.clone().answer(verdicts, Source::Redis)
    }

    fn replies(&mut self, request: &Request, reply: &Reply) {
        if request.check.mode() == Mode::UpTo && !request.is_abandoned() {
            let granted = reply.as_ref().map_or(0, Decision::granted);
            self.reported_units += u64::from(granted);
        }
    }
}

impl Store for Shared<Redis> {
    type Future = Waiting;

    fn check(&self, check: Check) -> Answer<Waiting> {
        Answer::pending(self.state().send(check))
    }
}

/// Totals of the leased blocks' units.
#[derive(Debug, Default)]
pub(crate) struct BlockTotals {
    pub(crate) ended: AtomicU64,
    pub(crate) charged: AtomicU64,
    pub(crate) refunded: AtomicU64,
    pub(crate) expired: AtomicU64,
    pub(crate) lost: AtomicU64,
}

impl Observer for Arc<BlockTotals> {
    fn notify(&self, event: &Event<'_>) {
        if let Event::LeasedBlockEnded {
            refunded,
            expired,
            charged,
            lost,
        } = *event
        {
            assert!(refunded + expired <= charged, "{event:?}");
            self.lost.fetch_add(lost, Relaxed);
            self.ended.fetch_add((charged > 0).into(), Relaxed);
            self.charged.fetch_add(charged, Relaxed);
            self.refunded.fetch_add(refunded, Relaxed);
            self.expired.fetch_add(expired, Relaxed);
        }
    }
}

type PendingCheck = <Leased<Shared<Redis>> as Store>::Future;

/// A simulated process.
pub(crate) struct Instance {
    pub(crate) store: Leased<Shared<Redis>>,
    clocked: Clocked,
    /// Its start in true time.
    began: i64,
    /// Excess of its clock's speed, in units of 1/1024.
    speed: i64,
    waiting: Vec<Pin<Box<PendingCheck>>>,
    /// Time at which a stopped instance continues.
    pub(crate) stopped_until: i64,
}

pub(crate) struct World {
    seed: Seed,
    /// Start of all processes, by their own clocks.
    start: Instant,
    pub(crate) rng: Rng,
    remote: Shared<Redis>,
    pub(crate) instances: Vec<Instance>,
    pub(crate) blocks: Arc<BlockTotals>,
    pub(crate) now: i64,
    /// Killed instances keep their blocks but do nothing.
    pub(crate) killed: Vec<Instance>,
    /// Time by the shared clock and cost of each grant from memory to a waiting check.
    pub(crate) from_memory: Vec<(i64, u32)>,
    /// Whether an instance was shut down.
    pub(crate) is_ended: bool,
}

impl World {
    pub(crate) fn new(seed: u64, instances: u32) -> Self {
        let mut rng = Rng::with_seed(seed);
        let remote = Redis {
            network: Network::default(),
            rng: rng.fork(),
            is_healthy: false,
            rejected_refunds: 0,
            delay_scale: rng.u64(100..20_000),
            speed: rng.i64(1024 - 64..=1024 + 64),
            counts: Counts::default(),
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
        let mut world = Self {
            seed,
            start,
            rng,
            remote: Shared::new(remote),
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

    pub(crate) fn shared<T>(&self, read: impl FnOnce(&mut Redis) -> T) -> T {
        read(&mut self.remote.state())
    }

    fn new_instance(&mut self, of: u32) -> Instance {
        let clocked = Clocked::new();
        self.seed.set_now(self.start);
        let store = Leased::builder(self.remote.clone()).share(of).build();
        store
            .backend()
            .observe(&(Arc::new(Arc::clone(&self.blocks)) as Arc<dyn Observer>));
        let speed = self.rng.i64(1024 - 64..=1024 + 64);
        Instance {
            store,
            clocked,
            began: self.now,
            speed,
            waiting: vec![],
            stopped_until: 0,
        }
    }

    /// The time by the shared store's clock.
    pub(crate) fn clock(&self) -> i64 {
        self.shared(|shared| shared.clock())
    }

    /// Maximum duration of a round trip.
    pub(crate) fn max_round_trip(&self) -> i64 {
        self.shared(|shared| 16 * shared.delay_scale as i64)
    }

    /// Advances the true time and all clocks.
    pub(crate) fn advance(&mut self, time: i64) {
        self.now += time;
        self.remote.passes_to(self.now as u64);
    }

    fn elapsed(&self, i: usize) -> Duration {
        let Instance { began, speed, .. } = self.instances[i];
        Duration::from_micros(((self.now - began) * speed / 1024) as u64)
    }

    /// Lets an instance act before any of its timers has run.
    pub(crate) fn act_as<T>(&mut self, i: usize, act: impl FnOnce(&mut Instance) -> T) -> T {
        self.seed.set_now(self.start + self.elapsed(i));
        let instance = &mut self.instances[i];
        let runtime = instance.clocked.runtime.as_ref();
        let handle = runtime.map(|runtime| runtime.handle().clone());
        let _runtime = handle.as_ref().map(|handle| handle.enter());
        act(instance)
    }

    /// Sends a check. Returns its decision if it is immediate.
    pub(crate) fn take(
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
    pub(crate) fn run(&mut self, i: usize) -> Vec<Reply> {
        let elapsed = self.elapsed(i);
        self.seed.set_now(self.start + elapsed);
        let instance = &mut self.instances[i];
        instance.clocked.passes_to(elapsed, 12);
        let mut answers = vec![];
        let runtime = instance.clocked.runtime.as_ref();
        let _runtime = runtime.map(Runtime::enter);
        let mut cx = Context::from_waker(Waker::noop());
        instance
            .waiting
            .retain_mut(|future| match future.as_mut().poll(&mut cx) {
                Poll::Ready(answer) => {
                    answers.push(answer);
                    false
                }
                Poll::Pending => true,
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
    pub(crate) fn send(&mut self, i: usize, check: Check) {
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
    pub(crate) fn start_another(&mut self) {
        let next = self.uninformed_instance();
        self.instances.push(next);
    }

    /// Replaces an instance, which is killed.
    pub(crate) fn kill(&mut self, i: usize) {
        let next = self.uninformed_instance();
        let killed = std::mem::replace(&mut self.instances[i], next);
        self.killed.push(killed);
    }

    /// Replaces an instance, which is shut down in order.
    pub(crate) fn shut_down(&mut self, i: usize) {
        let now = self.start + self.elapsed(i);
        self.is_ended = true;
        let next = self.uninformed_instance();
        let Instance { store, clocked, .. } = std::mem::replace(&mut self.instances[i], next);
        self.seed.set_now(now);
        if let Some(runtime) = clocked.runtime {
            let mut end = Box::pin(async move { store.shutdown().await });
            runtime.block_on(async {
                let _ = end.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            });
            drop(end);
            drop(runtime);
        }
    }
}
