use std::hash::BuildHasher;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::line::{Ask, Line};
use super::{Permit, Place, Refusal, Shared, TICK};
use crate::leases::Lease;
use crate::limit::{Check, Decision, Outcome, Policies, Policy};
use crate::store::{Error, RandomState, instant};

/// The task that serves a line until nobody waits in it.
pub(super) struct Clerk {
    shared: Arc<Shared>,
    place: Place,
    line: u64,
    wake: Arc<Notify>,
    runtime: Handle,
}

impl Clerk {
    pub(super) fn new(shared: Arc<Shared>, place: Place, line: &Line, runtime: Handle) -> Self {
        Self { shared, place, line: line.number(), wake: Arc::clone(&line.wake), runtime }
    }

    pub(super) async fn run(self) {
        self.sit_out_denial().await;
        let mut pace = Pace::default();
        while let Some(ask) = self.next(pace.room) {
            let asked_at = instant();
            let within = ask.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(asked_at));
            let check = Check::take_ahead(self.place.key, &ask.policies, ask.cost.saturating_mul(ask.count), within);
            // Before the store is asked.
            let mut lease = self.shared.leases.hold(self.place.key, &ask.policies);
            let answer = self.shared.store.ask(check).await;
            if let Some(lease) = &mut lease {
                lease.answered(answer.as_ref());
            }
            match answer {
                Ok(decision) => self.act_on(decision, lease, ask, asked_at, &mut pace).await,
                Err(error) => self.fail(&error),
            }
        }
    }

    /// A strategy that cannot owe is not asked before the denial is over that the line began with.
    async fn sit_out_denial(&self) {
        let denied = self.with_line(|line| line.ask(0).zip(line.denied_until())).flatten();
        if let Some((ask, until)) = denied.filter(|(ask, _)| !can_owe(&ask.policies)) {
            self.rest(until + TICK, &ask).await;
        }
    }

    /// What to ask for next, if anybody waits; else the line is gone.
    fn next(&self, room: u32) -> Option<Ask> {
        loop {
            self.refuse_overdue();
            if let Some(ask) = self.with_line(|line| line.ask(room)).flatten() {
                return Some(ask);
            }
            // Somebody may have come since.
            if self.shared.remove(&self.place, self.line, false).is_some() || self.with_line(|_| ()).is_none() {
                return None;
            }
        }
    }

    /// Does what the decision says.
    async fn act_on(&self, decision: Decision, mut lease: Option<Lease>, ask: Ask, asked_at: Instant, pace: &mut Pace) {
        let now = instant();
        let room = mem::take(&mut pace.room);
        match decision.outcome() {
            Outcome::Allowed | Outcome::Later { .. } => {
                let due_at = now + decision.due_in().unwrap_or_default();
                self.with_line(|line| line.learn(&ask, &decision, now, due_at, ask.count));
                *pace = Pace { room: decision.remaining(), losses: 0 };
                if !self.rest(due_at, &ask).await {
                    // Nobody may have it before it is due. What is asked for next is due the sooner.
                    let all = ask.cost.saturating_mul(ask.count);
                    let _ = self.shared.store.ask(Check::give_back(self.place.key, &ask.policies, all)).await;
                    return;
                }
                let decision = decision.due(ask.cost);
                for _ in 0..ask.count {
                    let permit =
                        Permit::new(&self.shared, self.place, &self.runtime, &ask, decision.clone(), asked_at, due_at);
                    // It is asked for one at a time under a policy that has one.
                    permit.with_lease(lease.take()).hand_on();
                }
                self.with_line(Line::all_served);
            }
            // There is less room than there was; if not less than it told, one is asked for.
            Outcome::Denied { .. } if ask.count > 1 => {
                pace.room = decision.remaining().min(room.saturating_sub(ask.cost))
            }
            Outcome::Denied { retry_after } => {
                let passes_at = now.checked_add(retry_after);
                self.with_line(|line| line.learn(&ask, &decision, now, passes_at.unwrap_or(now), 0));
                match passes_at {
                    Some(passes_at) if ask.deadline.is_none_or(|deadline| passes_at <= deadline) => {
                        let several = self.with_line(|line| line.len() > 1).unwrap_or_default();
                        self.rest(now + pace.retry_in(&decision, retry_after, several), &ask).await;
                    }
                    _ => self.refuse(ask.first, decision),
                }
            }
            Outcome::NeverFits => self.refuse(ask.first, decision),
        }
    }

    /// Rests until then, and meanwhile refuses those whose time is up. Returns at once, and `false`, if nobody waits, or if
    /// the line has to be asked for again.
    async fn rest(&self, until: Instant, ask: &Ask) -> bool {
        while instant() < until {
            self.refuse_overdue();
            let Some(wakes_at) = self.with_line(|line| line.rest(until, ask, instant())).flatten() else {
                return false;
            };
            // Woken or not, it looks.
            let _ = timeout_at(wakes_at, self.wake.notified()).await;
        }
        true
    }

    fn refuse_overdue(&self) {
        let late = self.with_line(|line| line.overdue(instant()));
        for (waiter, denial) in late.into_iter().flatten() {
            let _ = waiter.tell(Err(Refusal::Denied(denial)));
        }
    }

    /// Tells the one of this number no, if it still waits.
    fn refuse(&self, number: u64, decision: Decision) {
        if let Some(waiter) = self.with_line(|line| line.leave(number)).flatten() {
            let _ = waiter.tell(Err(Refusal::Denied(decision)));
        }
    }

    /// Tells all that the store cannot decide.
    fn fail(&self, error: &Error) {
        for waiter in self.with_line(Line::clear).into_iter().flatten() {
            let _ = waiter.tell(Err(Refusal::Failed(error.clone())));
        }
    }

    fn with_line<T>(&self, act: impl FnOnce(&mut Line) -> T) -> Option<T> {
        self.shared.with_line(&self.place, self.line, act)
    }
}

/// If its runtime ends it takes the line away, which tells those who wait.
impl Drop for Clerk {
    fn drop(&mut self) {
        drop(self.shared.remove(&self.place, self.line, true));
    }
}

/// Whether what is taken ahead may be owed under these policies.
fn can_owe(policies: &Policies) -> bool {
    policies.iter().all(|policy| policy.strategy().has_burst())
}

/// How much to ask for next, and when.
#[derive(Debug, Default)]
struct Pace {
    /// For how much there was room after the last answer.
    room: u32,
    /// How often in a row others had taken ahead as much as may be owed.
    losses: u32,
}

impl Pace {
    /// When to ask again after a denial of what would be in time: it passes after `retry_after`.
    fn retry_in(&mut self, decision: &Decision, retry_after: Duration, several: bool) -> Duration {
        let policy = decision.policy();
        let spacing = policy.quota().time_for(1);
        if let Some(wait) = until_more_may_be_owed(decision) {
            // Whoever is ahead takes it then. Who comes again and again in vain stays away for longer, so that each turn is
            // not asked for by all.
            self.losses = (self.losses + 1).min(4);
            let pause = spacing.saturating_mul(1 << self.losses).min(Duration::from_secs(1)).mul_f64(random());
            return wait.saturating_add(pause).max(TICK);
        }
        if !several || !policy.strategy().trickles() {
            return retry_after + TICK;
        }
        // What comes free one by one is left to gather a little, so that a call gets several; for a random time, or one
        // instance would always come before the others.
        retry_after + TICK + spacing.min(policy.quota().period() / 50).mul_f64(2.0 * random())
    }
}

/// From 0 to 1.
fn random() -> f64 {
    RandomState::new().hash_one(0) as f64 / u64::MAX as f64
}

/// When a full count less is owed, if others have taken ahead as much as may be owed. A denial for less than that is of a
/// store that knows no debt, or of what costs nothing.
fn until_more_may_be_owed(decision: &Decision) -> Option<Duration> {
    let longer = decision.verdicts().map(|(policy, verdict)| {
        let wait = Duration::from_micros(u64::try_from(verdict.wait).unwrap_or_default());
        wait.saturating_sub(full_debt(policy))
    });
    longer.max().filter(|wait| can_owe(decision.policies()) && !wait.is_zero())
}

/// How long it takes to pay as much as may be owed; rounded up to microseconds, as the waits of decisions are.
fn full_debt(policy: &Policy) -> Duration {
    let quota = policy.quota();
    if policy.strategy().is_steady() {
        let nanos = quota.time_for(quota.capacity().into()).as_nanos();
        u64::try_from(nanos.div_ceil(1_000)).map_or(Duration::MAX, Duration::from_micros)
    } else {
        quota.period().saturating_mul(quota.capacity() / quota.limit().max(1))
    }
}
