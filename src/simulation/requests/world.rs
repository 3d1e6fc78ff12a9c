//! The store of a run and the network to it: its counts, and the fate of requests.

use fastrand::Rng;

use super::ledger::{Ledger, Rule};
use super::plan::{Caller, Fault, Kind, Plan, TIMEOUT};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Key, Mode, Source, Verdicts};
use crate::observe::{Event, Observer};
use crate::simulation::network::{
    Counts, Fate, Network, NetworkEvent, Remote, Reply, Request, Shared, Waiting,
};
use crate::simulation::{Log, shown, verdict};
use crate::store::{Answer, Backend, Store, Waiters};

pub(super) type World = Shared<WorldState>;

#[derive(Debug)]
pub(super) struct WorldState {
    pub(super) plan: Plan,
    pub(super) ledger: Ledger,
    network: Network,
    rng: Rng,
    counts: Counts,
}

/// Returns the requests of a caller that the store counts, but that are not yet in flight, or are
/// about to be released.
fn in_flight(request: &Request, key: &Key) -> i64 {
    match (&request.next, request.check.mode()) {
        _ if request.check.key() != key => 0,
        (NetworkEvent::IsAnswered(Ok(decision)), Mode::Take) if !request.is_abandoned() => {
            decision.granted().into()
        }
        (NetworkEvent::Leaves | NetworkEvent::Runs, Mode::Release) => 1,
        _ => 0,
    }
}

impl WorldState {
    pub(super) fn new(plan: Plan, rng: Rng, kept: bool) -> Self {
        Self {
            ledger: Ledger::new(&plan, Log::new(kept)),
            plan,
            network: Network::default(),
            rng,
            counts: Counts::default(),
        }
    }

    /// Milliseconds since the start.
    pub(super) fn now(&self) -> u64 {
        self.network.now
    }

    pub(super) fn say(&mut self, caller: Option<usize>, text: impl FnOnce() -> String) {
        self.ledger.log.say(self.network.now, caller, text);
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
        Answer::pending(self.network.send(instance, check, fate))
    }

    /// Returns the fate of a new request. `None` if it cannot be sent.
    fn fate(&mut self, instance: usize) -> Option<Fate> {
        let (most, rng) = (self.plan.delay, &mut self.rng);
        let well = Fate {
            queued: rng.u64(..2),
            sent: rng.u64(..=most),
            runs: true,
            back: rng.u64(..=most),
            error: None,
        };
        let lost = Fate {
            back: TIMEOUT,
            error: Some(StoreError::new(ErrorKind::Timeout)),
            ..well.clone()
        };
        let now = self.network.now;
        Some(match self.plan.fault(instance, now) {
            None => well,
            Some(Fault {
                kind: Kind::Down, ..
            }) => return None,
            Some(Fault {
                kind: Kind::Slow, ..
            }) => Fate {
                sent: rng.u64(..500),
                back: rng.u64(..500),
                ..well
            },
            Some(Fault {
                kind: Kind::Frozen,
                until,
                ..
            }) => Fate {
                sent: until - now + rng.u64(..5),
                ..well
            },
            Some(_) if rng.u8(..3) == 0 => well,
            Some(Fault {
                kind: Kind::LosingRequests,
                ..
            }) => Fate {
                runs: false,
                ..lost
            },
            Some(Fault {
                kind: Kind::LosingReplies,
                ..
            }) => lost,
        })
    }

    fn counts(&mut self, check: &Check) -> Decision {
        let now = self.plan.wall + self.network.now as i64 * 1000;
        let verdicts = Verdicts {
            at: now,
            ..self.counts.decide(check, now)
        };
        check.clone().answer(verdicts, Source::Redis)
    }

    /// Compares the store's count of steady callers with their requests in flight, once they should
    /// be equal.
    pub(super) fn watch_steady(&mut self) {
        if !(self.plan.heals_at()..self.plan.last()).contains(&self.network.now) {
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
                .network
                .requests()
                .map(|request| in_flight(request, &key))
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

impl Remote for WorldState {
    fn network(&mut self) -> &mut Network {
        &mut self.network
    }

    fn runs(
        &mut self,
        &Request {
            instance,
            ref check,
            ..
        }: &Request,
    ) -> Decision {
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

    fn is_withdrawn(
        &mut self,
        &Request {
            instance,
            ref check,
            ..
        }: &Request,
    ) {
        self.say(self.caller(check.key()), || {
            format!("i{instance} never sends: {}", shown(check))
        });
    }

    fn replies(
        &mut self,
        &Request {
            instance,
            ref check,
            ..
        }: &Request,
        reply: &Reply,
    ) {
        if reply.is_err() {
            self.say(self.caller(check.key()), || {
                format!("i{instance} gets no reply: {}", shown(check))
            });
        }
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

/// The observer of an instance.
pub(super) struct Recorder {
    pub(super) world: World,
    pub(super) instance: usize,
}

impl Observer for Recorder {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed {
            key: Some(key),
            error,
            ..
        } = *event
        {
            let (instance, kind) = (self.instance, error.kind().as_str());
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
}
