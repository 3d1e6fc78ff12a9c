use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::line::{Ask, Line};
use super::{Permit, Place, Refusal, Shared, TICK};
use crate::limit::{Check, Decision, Outcome, Policy};
use crate::store::{Error, instant};

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
            match self.shared.store.ask(check).await {
                Ok(decision) => self.act_on(decision, ask, asked_at, within, &mut pace).await,
                Err(error) => self.fail(&error),
            }
        }
    }

    /// A strategy that cannot owe is not asked before the denial is over that the line began with.
    async fn sit_out_denial(&self) {
        let until = self.with_line(|line| {
            let owes = line.ask(0).is_some_and(|ask| ask.policies.iter().all(|policy| policy.strategy().has_burst()));
            line.denied_until().filter(|_| !owes)
        });
        if let Some(until) = until.flatten() {
            self.rest(until + TICK).await;
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
    async fn act_on(&self, decision: Decision, ask: Ask, asked_at: Instant, within: Duration, pace: &mut Pace) {
        let now = instant();
        let room = mem::take(&mut pace.room);
        match decision.outcome() {
            Outcome::Allowed | Outcome::Later { .. } => {
                let due_in = decision.due_in().unwrap_or_default();
                let due_at = now + due_in;
                self.with_line(|line| line.learn(&decision, due_at, ask.count));
                *pace = Pace { room: decision.remaining(), losses: 0 };
                let decision = decision.due(ask.cost);
                let permit =
                    |decision| Permit::new(&self.shared, self.place, &self.runtime, &ask, decision, asked_at, due_at);
                // Kept as permits while they are not due: they go back if nobody waits any more, or this runtime ends.
                let permits: Vec<_> = (0..ask.count).map(|_| permit(decision.clone())).collect();
                if !due_in.is_zero() {
                    self.rest(due_at).await;
                }
                permits.into_iter().for_each(Permit::hand_on);
            }
            // There is less room than there was; if not less than it told, one is asked for.
            Outcome::Denied { .. } if ask.count > 1 => {
                pace.room = decision.remaining().min(room.saturating_sub(ask.cost))
            }
            Outcome::Denied { retry_after } => {
                let passes_at = now.checked_add(retry_after);
                self.with_line(|line| line.learn(&decision, passes_at.unwrap_or(now), 0));
                match passes_at {
                    Some(passes_at) if ask.deadline.is_none_or(|deadline| passes_at <= deadline) => {
                        let several = self.with_line(|line| line.len() > 1).unwrap_or_default();
                        self.rest(now + pace.retry_in(decision.policy(), retry_after, within, several)).await;
                    }
                    _ => self.refuse(ask.first, decision),
                }
            }
            Outcome::NeverFits => self.refuse(ask.first, decision),
        }
    }

    /// Rests until then, or until nobody waits. Meanwhile refuses those whose time is up.
    async fn rest(&self, until: Instant) {
        while instant() < until {
            self.refuse_overdue();
            let wakes_at = self.with_line(|line| {
                let wakes_at = line.first_deadline().map_or(until, |deadline| deadline.min(until));
                line.wakes_at = Some(wakes_at);
                (line.len() > 0).then_some(wakes_at)
            });
            let Some(wakes_at) = wakes_at.flatten() else { return };
            // Woken or not, it looks.
            let _ = timeout_at(wakes_at, self.wake.notified()).await;
        }
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

/// How much to ask for next, and when.
#[derive(Debug, Default)]
struct Pace {
    /// For how much there was room after the last answer.
    room: u32,
    /// How often in a row others had taken ahead as much as may be owed.
    losses: u32,
}

impl Pace {
    /// When to ask again after a denial: what is wanted passes after `retry_after`.
    fn retry_in(&mut self, policy: &Policy, retry_after: Duration, within: Duration, several: bool) -> Duration {
        let quota = policy.quota();
        let spacing = quota.period() / quota.limit().max(1);
        if policy.strategy().has_burst() && retry_after <= within {
            // There is room for more when a full count less is owed, and whoever is ahead takes it. Who comes again and again
            // in vain stays away for longer, so that each turn is not asked for by all.
            self.losses = (self.losses + 1).min(4);
            let pause = spacing.saturating_mul(1 << self.losses).min(Duration::from_secs(1)).mul_f64(random());
            return retry_after
                .saturating_sub(spacing.saturating_mul(quota.capacity()))
                .saturating_add(pause)
                .max(TICK);
        }
        if !several || !policy.strategy().trickles() {
            return retry_after + TICK;
        }
        // What comes free one by one is left to gather a little, so that a call gets several; for a random time, or one
        // instance would always come before the others.
        retry_after + TICK + spacing.min(quota.period() / 50).mul_f64(2.0 * random())
    }
}

/// From 0 to 1.
fn random() -> f64 {
    RandomState::new().hash_one(0) as f64 / u64::MAX as f64
}
