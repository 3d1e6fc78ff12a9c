//! The state of a run: the counts of the primary store, the requests, and their outcomes.

mod observer;
mod requests;
mod shown;

pub(super) use observer::LogObserver;

use fastrand::Rng;
use futures_util::FutureExt;
use tokio::time::Instant;

use super::streak::FailureStreak;
use shown::{answered, nonsense};

use super::ledger::{Granted, Heard, Ledger, Ran, Reconciled, Rule};
use super::plan::{Caller, Kind, Plan};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Extra, Key, Mode, Outcome, Source};
use crate::observe::{Event, Observer};
use crate::simulation::network::Shared;
use crate::simulation::{Log, pick, shown, verdict};
use crate::store::{LocalStore, Store};
use crate::util::instant;

pub(super) type World = Shared<WorldState>;

#[derive(Debug)]
pub(super) struct WorldState {
    pub(super) plan: Plan,
    pub(super) ledger: Ledger,
    rng: Rng,
    start: Instant,
    /// Whether each instance has reported to be degraded.
    degraded: Vec<bool>,
    /// Time until which the last probe or reconciling check of each instance may have no reply.
    turned: Vec<u64>,
    streaks: Vec<FailureStreak>,
    /// The time and the fate of each instance's last request. Requests that share a call share the
    /// fate.
    calls: Vec<Option<(u64, Fate)>>,
    /// The counts of the primary store.
    counts: LocalStore,
    /// The client's request that is being polled. Other activity belongs to the instance.
    current: Option<usize>,
    asks: Vec<Ask>,
    requests: Vec<Request>,
}

/// A client's request.
#[derive(Debug)]
struct Ask {
    instance: usize,
    caller: usize,
    check: Check,
    since: u64,
    /// Whether it was sent to the primary store, and whether it was reported as not sent.
    asked: bool,
    unsent: bool,
    ran: Ran,
    /// Number of resets of the caller that were answered before.
    resets_told: u32,
}

/// A request to the primary store.
#[derive(Debug)]
struct Request {
    instance: usize,
    /// `None` for a probe.
    caller: Option<usize>,
    /// `None` if no client sent it.
    ask: Option<usize>,
    reconciled: Option<Reconciled>,
    sent: bool,
    ran: bool,
}

/// The fate of a request. Times are in milliseconds.
#[derive(Debug, Clone)]
pub(super) struct Fate {
    /// Time in the queue. A check that is withdrawn in this time is not charged.
    pub(super) queued: u64,
    /// Time from then until it is executed.
    pub(super) sent: u64,
    pub(super) runs: bool,
    /// Time from then until the reply.
    pub(super) back: u64,
    pub(super) answer: Reply,
}

#[derive(Debug, Clone)]
pub(super) enum Reply {
    Decision,
    Error(StoreError),
    Never,
}

impl World {
    /// Attributes the requests of `work` to a client's request.
    pub(super) fn during<T>(&self, ask: usize, work: impl FnOnce() -> T) -> T {
        self.state().current = Some(ask);
        let done = work();
        self.state().current = None;
        done
    }
}

impl WorldState {
    pub(super) fn new(plan: Plan, rng: Rng, kept: bool, counts: LocalStore) -> Self {
        Self {
            ledger: Ledger::new(&plan, Log::new(kept)),
            rng,
            start: instant(),
            degraded: vec![false; plan.instances],
            turned: vec![0; plan.instances],
            streaks: (0..plan.instances)
                .map(|_| FailureStreak::default())
                .collect(),
            calls: vec![None; plan.instances],
            counts,
            current: None,
            asks: vec![],
            requests: vec![],
            plan,
        }
    }

    /// Milliseconds since the start.
    pub(super) fn now(&self) -> u64 {
        (instant() - self.start).as_millis() as u64
    }

    fn say(&mut self, caller: Option<usize>, text: impl FnOnce() -> String) {
        let now = self.now();
        self.ledger.log.say(now, caller, text);
    }

    pub(super) fn note(&mut self, text: String) {
        self.say(None, || text);
    }

    fn breaks(&mut self, rule: Rule, caller: Option<usize>, problem: String) {
        self.ledger.breaks(rule, caller, problem);
    }

    fn checks(&mut self, rule: Rule) {
        self.ledger.checks(rule);
    }

    /// A client sends a check.
    pub(super) fn asks(&mut self, instance: usize, caller: usize, check: &Check) -> usize {
        let (ask, check) = (self.asks.len(), check.clone());
        self.say(Some(caller), || {
            format!("i{instance} #{ask:<4} {}", shown(&check))
        });
        let since = self.now();
        self.asks.push(Ask {
            instance,
            caller,
            check,
            since,
            asked: false,
            unsent: false,
            ran: Ran::default(),
            resets_told: self.ledger.resets_told(caller),
        });
        ask
    }

    /// A client receives the answer.
    pub(super) fn answered(
        &mut self,
        ask: usize,
        polled: u64,
        degraded: bool,
        answer: &Result<Decision, StoreError>,
    ) {
        let now = self.now();
        let Ask {
            instance,
            caller,
            ref check,
            since,
            ran,
            resets_told,
            ..
        } = self.asks[ask];
        let check = check.clone();
        self.say(Some(caller), || {
            format!("i{instance} #{ask:<4} answered: {}", answered(answer))
        });
        let deadline = since + self.plan.deadline;
        let latest = if polled > deadline {
            // The deadline was noticed late, so its eight graces follow, each rounded up to a millisecond.
            polled + self.plan.deadline + 8
        } else {
            deadline
        };
        if now >= deadline {
            self.checks(Rule::Wait);
        }
        if now > latest {
            let deadline = self.plan.deadline;
            let problem = format!(
                "#{ask} was answered after {} ms, with a deadline of {deadline} ms",
                now - since
            );
            self.breaks(Rule::Wait, Some(caller), problem);
        }
        let decision = match answer {
            Ok(decision) => decision,
            // The refund is sent again, as the background queue does.
            Err(error) if check.mode() == Mode::Refund => {
                return self.ledger.refuses(caller, error.is_not_sent());
            }
            Err(error) => {
                return self.breaks(
                    Rule::Failed,
                    Some(caller),
                    format!("#{ask} failed: {error}"),
                );
            }
        };
        self.checks(Rule::Sense);
        if decision.source() == Source::Local {
            self.checks(Rule::Failed);
        }
        self.ledger.answers(caller, &check, decision, resets_told);
        if decision.source() == Source::Redis {
            self.streaks[instance].replies(now);
        }
        // An id repeats its earlier answer, which may be under another share.
        let other = check.id().is_some() && self.ledger.changed;
        if let Some(problem) =
            nonsense(&self.plan.callers[caller], &check, decision).filter(|_| !other)
        {
            self.breaks(Rule::Sense, Some(caller), format!("#{ask}: {problem}"));
        }
        if decision.source() == Source::Redis && !degraded && !decision.is_repeated() {
            let turned = self.turned[instance];
            self.ledger.hears(
                &self.plan,
                now,
                &Heard {
                    caller,
                    instance,
                    ran,
                    since,
                    turned,
                },
                decision,
            );
        }
        if matches!(check.mode(), Mode::Take | Mode::UpTo) && decision.granted() > 0 {
            let id = check.id().map(Key::as_bytes);
            self.ledger
                .grants(&self.plan, now, caller, i64::from(decision.granted()), id);
        }
    }

    /// A client drops its future.
    pub(super) fn dropped(&mut self, ask: usize) {
        let Ask {
            instance, caller, ..
        } = self.asks[ask];
        self.say(Some(caller), || format!("i{instance} #{ask:<4} dropped"));
    }

    /// The local store of an instance decides.
    pub(super) fn decides_locally(&mut self, instance: usize, check: &Check, decision: &Decision) {
        let Some(ask) = self.current else {
            let caller = self.caller(check);
            return self.say(caller, || {
                format!("i{instance}       looks: {}", shown(check))
            });
        };
        let Ask {
            caller,
            asked,
            unsent,
            ..
        } = self.asks[ask];
        self.say(Some(caller), || {
            format!("i{instance} #{ask:<4} decides: {}", verdict(decision))
        });
        let now = self.now();
        let (mode, cost, id) = (
            check.mode(),
            i64::from(check.cost()),
            check.id().map(Key::as_bytes),
        );
        let granted = Granted {
            caller,
            instance,
            mode,
            cost,
            id,
            of_older: matches!(check.extra(), Some(Extra::Charged(each)) if !each.is_empty()),
            unasked: !asked || unsent,
            degraded: self.degraded[instance],
        };
        self.ledger
            .decides(&self.plan, now, &granted, i64::from(decision.granted()));
    }

    fn caller(&self, check: &Check) -> Option<usize> {
        self.plan
            .callers
            .iter()
            .position(|caller| caller.key == *check.key())
    }

    /// The primary store loses all counts.
    pub(super) fn empties(&mut self) {
        self.counts = LocalStore::default();
        self.ledger.emptied += 1;
        self.say(None, || "Redis forgets everything".to_owned());
    }

    /// After all clients and faults have ended: checks that everything was reconciled.
    pub(super) fn rests(&mut self) {
        self.say(None, || "all is quiet".to_owned());
        for (index, caller) in self.plan.callers.iter().enumerate() {
            let peek = Check::peek(caller.key, &caller.policies, 0);
            let decision = self.counts.check(peek).now_or_never().unwrap().unwrap();
            let used = decision
                .each()
                .map(|each| i64::from(each.capacity() - each.remaining()))
                .max()
                .unwrap();
            self.ledger.rests(&self.plan, index, used);
        }
    }

    pub(super) fn check_rule(&mut self, rule: Rule) {
        self.checks(rule);
    }

    pub(super) fn break_rule(&mut self, rule: Rule, problem: String) {
        self.breaks(rule, None, problem);
    }
}
