//! The store of a run and the network to it: its counts, and the fate of requests.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

use fastrand::Rng;
use tokio::sync::oneshot;

use super::ledger::{Ledger, Rule};
use super::plan::{Caller, Fault, Kind, Plan, TIMEOUT};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key, Mode, Source, State};
use crate::observe::{Observer, event};
use crate::simulation::{Log, shown, verdict};
use crate::store::{Answer, Backend, Store, Waiters};
use crate::util::lock;

#[derive(Debug, Clone)]
pub(super) struct World(Arc<Mutex<WorldState>>);

#[derive(Debug)]
pub(super) struct WorldState {
    pub(super) plan: Plan,
    pub(super) ledger: Ledger,
    pub(super) log: Log,
    /// Milliseconds since the start.
    pub(super) now: u64,
    rng: Rng,
    /// The store's counts, by caller and policy.
    counts: HashMap<(Key, u64), State>,
    /// Future events by time, then by the order of their creation.
    events: BTreeMap<(u64, u64), Event>,
    made: u64,
    /// The number of checks that the store has decided.
    decided: i64,
}

/// The next event of a request.
#[derive(Debug)]
enum Event {
    /// The request leaves the queue, unless its sender has stopped waiting.
    Leaves(Request),
    Runs(Request),
    IsAnswered(Request, Result<Decision, StoreError>),
}

impl Event {
    /// Returns the requests of a caller that the store counts, but that are not yet in flight, or
    /// are about to be released.
    fn in_flight(&self, key: &Key) -> i64 {
        match self {
            Self::IsAnswered(Request { check, answer, .. }, Ok(decision))
                if check.key() == key && check.mode() == Mode::Take && !answer.is_closed() =>
            {
                decision.granted().into()
            }
            Self::Leaves(Request { check, .. }) | Self::Runs(Request { check, .. })
                if check.key() == key && check.mode() == Mode::Release =>
            {
                1
            }
            _ => 0,
        }
    }
}

#[derive(Debug)]
struct Request {
    instance: usize,
    check: Check,
    fate: Fate,
    answer: oneshot::Sender<Result<Decision, StoreError>>,
}

/// The fate of a request, with times in milliseconds.
#[derive(Debug, Clone, Copy)]
struct Fate {
    /// Time in the queue. A request that is abandoned in that time is not charged.
    queued: u64,
    /// Time from leaving the queue until it runs.
    sent: u64,
    /// Whether it runs: `false` if it is lost on its way to the store.
    runs: bool,
    /// Time from running until the reply. `None` if the reply is lost.
    back: Option<u64>,
}

impl World {
    pub(super) fn new(plan: Plan, rng: Rng, kept: bool) -> Self {
        Self(Arc::new(Mutex::new(WorldState {
            ledger: Ledger::new(&plan),
            plan,
            log: Log {
                kept,
                ..Log::default()
            },
            now: 0,
            rng,
            counts: HashMap::new(),
            events: BTreeMap::new(),
            made: 0,
            decided: 0,
        })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, WorldState> {
        lock(&self.0)
    }

    /// Executes all events that are due at `now`.
    pub(super) fn passes_to(&self, now: u64) {
        loop {
            let answer = {
                let state = &mut *self.state();
                match state.events.first_key_value() {
                    Some((&(at, _), _)) if at <= now => {
                        // An event may have been due before the runtime that created it ran.
                        state.now = at.max(state.now);
                        let (_, event) = state.events.pop_first().unwrap();
                        state.happens(event)
                    }
                    _ => {
                        state.now = now;
                        return;
                    }
                }
            };
            // Send without the lock: the receiver may send another request immediately.
            if let Some((sender, answer)) = answer {
                let _ = sender.send(answer);
            }
        }
    }
}

type Answered = (
    oneshot::Sender<Result<Decision, StoreError>>,
    Result<Decision, StoreError>,
);

impl WorldState {
    pub(super) fn say(&mut self, caller: Option<usize>, text: impl FnOnce() -> String) {
        self.say_broken();
        self.log.say(self.now, caller, text);
    }

    /// Writes new breaks to the log, so that they appear at the step that caused them.
    pub(super) fn say_broken(&mut self) {
        self.ledger.broken.say(&mut self.log, self.now);
    }

    pub(super) fn breaks(&mut self, rule: Rule, caller: Option<usize>, problem: String) {
        self.ledger.breaks(rule, caller, problem);
    }

    /// Records that the store failed to decide for a client.
    pub(super) fn failed(&mut self, caller: usize, error: &StoreError) {
        self.say(Some(caller), || format!("fails: {error}"));
        if self.plan.is_well() {
            self.breaks(Rule::Failed, Some(caller), error.to_string());
        }
    }

    pub(super) fn caller(&self, key: &Key) -> Option<usize> {
        self.plan
            .callers
            .iter()
            .position(|caller| caller.key == *key)
    }

    fn will(&mut self, after: u64, event: Event) {
        self.made += 1;
        self.events.insert((self.now + after, self.made), event);
    }

    /// Accepts a request to the store, unless a fault prevents sending it.
    fn arrives(&mut self, instance: usize, check: Check) -> Answer<Waiting> {
        let fate = match self.fate(instance) {
            Some(fate) => fate,
            None => {
                self.say(self.caller(check.key()), || {
                    format!("i{instance} cannot send: {}", shown(&check))
                });
                return Answer::ready(Err(StoreError::new(ErrorKind::Unreachable).not_sent()));
            }
        };
        self.say(self.caller(check.key()), || {
            format!("i{instance} sends: {}", shown(&check))
        });
        let (answer, answered) = oneshot::channel();
        self.will(
            fate.queued,
            Event::Leaves(Request {
                instance,
                check,
                fate,
                answer,
            }),
        );
        Answer::pending(Waiting(answered))
    }

    /// Returns the fate of a new request. `None` if it cannot be sent.
    fn fate(&mut self, instance: usize) -> Option<Fate> {
        let (most, rng) = (self.plan.delay, &mut self.rng);
        let well = Fate {
            queued: rng.u64(..2),
            sent: rng.u64(..=most),
            runs: true,
            back: Some(rng.u64(..=most)),
        };
        Some(match self.plan.fault(instance, self.now) {
            None => well,
            Some(Fault {
                kind: Kind::Down, ..
            }) => return None,
            Some(Fault {
                kind: Kind::Slow, ..
            }) => Fate {
                sent: rng.u64(..500),
                back: Some(rng.u64(..500)),
                ..well
            },
            Some(Fault {
                kind: Kind::Frozen,
                until,
                ..
            }) => Fate {
                sent: until - self.now + rng.u64(..5),
                ..well
            },
            Some(_) if rng.u8(..3) == 0 => well,
            Some(Fault {
                kind: Kind::LosingRequests,
                ..
            }) => Fate {
                runs: false,
                back: None,
                ..well
            },
            Some(Fault {
                kind: Kind::LosingReplies,
                ..
            }) => Fate { back: None, ..well },
        })
    }

    fn happens(&mut self, event: Event) -> Option<Answered> {
        match event {
            Event::Leaves(request) if request.answer.is_closed() => {
                let Request {
                    instance, check, ..
                } = request;
                self.say(self.caller(check.key()), || {
                    format!("i{instance} never sends: {}", shown(&check))
                });
            }
            Event::Leaves(request) => self.will(request.fate.sent, Event::Runs(request)),
            Event::Runs(request) => {
                let decision = request
                    .fate
                    .runs
                    .then(|| self.runs(request.instance, &request.check));
                match (request.fate.back, decision) {
                    (Some(back), Some(decision)) => {
                        self.will(back, Event::IsAnswered(request, Ok(decision)))
                    }
                    _ => self.will(
                        TIMEOUT,
                        Event::IsAnswered(request, Err(StoreError::new(ErrorKind::Timeout))),
                    ),
                }
            }
            Event::IsAnswered(
                Request {
                    answer,
                    instance,
                    check,
                    ..
                },
                result,
            ) => {
                if result.is_err() {
                    self.say(self.caller(check.key()), || {
                        format!("i{instance} gets no reply: {}", shown(&check))
                    });
                }
                return Some((answer, result));
            }
        }
        None
    }

    /// Executes a request in the store.
    fn runs(&mut self, instance: usize, check: &Check) -> Decision {
        let decision = self.counts(check);
        let caller = self.caller(check.key());
        self.say(caller, || {
            format!(
                "i{instance} in the store: {}: {}",
                shown(check),
                verdict(&decision)
            )
        });
        if let Some(caller) = caller {
            self.ledger.ran(
                caller,
                check.mode(),
                check.cost().into(),
                decision.granted().into(),
            );
        }
        decision
    }

    fn counts(&mut self, check: &Check) -> Decision {
        let places: Vec<_> = check
            .policies()
            .iter()
            .map(|policy| (*check.key(), policy.id()))
            .collect();
        let mut counts = Vec::new();
        for (place, policy) in places.iter().zip(check.policies().iter()) {
            counts.push(
                self.counts
                    .remove(place)
                    .unwrap_or_else(|| State::fresh(policy.kind())),
            );
        }
        let verdicts = check.decide(&mut counts, self.plan.wall + self.now as i64 * 1000);
        self.counts.extend(places.into_iter().zip(counts));
        self.decided += 1;
        check
            .clone()
            .answer(verdicts, Source::Redis)
            .decided_at(self.decided)
    }

    /// Compares the store's count of steady callers with their requests in flight, once they should
    /// be equal.
    pub(super) fn watch_steady(&mut self) {
        if !(self.plan.heals_at()..self.plan.last()).contains(&self.now) {
            return;
        }
        for caller in 0..self.plan.callers.len() {
            let Caller {
                key,
                is_steady: true,
                ..
            } = self.plan.callers[caller]
            else {
                continue;
            };
            let on_the_way = self
                .events
                .values()
                .map(|event| event.in_flight(&key))
                .sum::<i64>();
            let counted = self.used(caller) - on_the_way;
            self.ledger.is_steady(caller, counted);
        }
    }

    /// Returns the used capacity of a caller.
    pub(super) fn used(&mut self, caller: usize) -> i64 {
        let who = &self.plan.callers[caller];
        let peek = Check::peek(who.key, &who.policies.clone(), 0);
        let decision = self.counts(&peek);
        i64::from(decision.capacity()) - i64::from(decision.remaining())
    }
}

/// The store, as seen by one instance.
#[derive(Debug, Clone)]
pub(super) struct Far {
    pub(super) world: World,
    pub(super) instance: usize,
    pub(super) waiters: Waiters,
}

impl Store for Far {
    type Future = Waiting;

    fn check(&self, check: Check) -> Answer<Waiting> {
        self.world.state().arrives(self.instance, check)
    }

    fn backend(&self) -> Backend<'_, Waiting> {
        Backend::from(&self.waiters)
    }
}

pub(super) struct Waiting(oneshot::Receiver<Result<Decision, StoreError>>);

impl Future for Waiting {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(Result::unwrap)
    }
}

/// The observer of an instance.
pub(super) struct Recorder {
    pub(super) world: World,
    pub(super) instance: usize,
}

impl Observer for Recorder {
    fn failed(&self, event: &event::Failed<'_>) {
        let Some(key) = event.key else { return };
        let (instance, kind) = (self.instance, event.error.kind().as_str());
        let mut state = self.world.state();
        let Some(caller) = state.caller(key) else {
            return;
        };
        state.ledger.is_reported(caller);
        state.say(Some(caller), || {
            format!("i{instance} reports a lost settlement: {kind}")
        });
    }
}
