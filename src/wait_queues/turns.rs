//! The task of a line that takes turns ahead.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};

use super::line::{Missing, Turn};
use super::permit::Charge;
use super::{Place, Refusal, TICK};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Outcome};
use crate::util::instant;

pub(super) struct Turns {
    place: Place,
}

/// The reply to a check that took a turn ahead.
struct Reserved {
    missing: Missing,
    asked_at: Instant,
    answer: Result<Decision, StoreError>,
}

impl Turns {
    pub(super) fn new(place: Place) -> Self {
        Self { place }
    }

    pub(super) async fn run(self) {
        let Some(wake) = self.place.with(|line| Arc::clone(&line.wake)) else {
            return;
        };
        let (mut replies, mut asked) = (FuturesUnordered::new(), 0);
        loop {
            let missing = self.place.with(|line| line.missing(asked));
            for missing in missing.unwrap_or_default() {
                asked += u64::from(missing.units);
                replies.push(self.reserve(missing));
            }
            self.give();
            self.refuse_overdue();
            if replies.is_empty() && self.place.ends() {
                return;
            }
            let next = self.place.with(|line| {
                let idle = line.remembers_until().filter(|_| replies.is_empty());
                let deadline = line.next_deadline(instant()).map(|at| at + TICK);
                line.due().or(idle).into_iter().chain(deadline).min()
            });
            let mut due = pin!(next.flatten().map(sleep_until));
            let mut woken = pin!(wake.notify.notified());
            let reply = poll_fn(|cx| {
                if let Poll::Ready(Some(reply)) = replies.poll_next_unpin(cx) {
                    return Poll::Ready(Some(reply));
                }
                let is_due = due.as_mut().as_pin_mut().map(|due| due.poll(cx));
                if woken.as_mut().poll(cx).is_ready() || is_due == Some(Poll::Ready(())) {
                    return Poll::Ready(None);
                }
                Poll::Pending
            });
            if let Some(reply) = reply.await {
                asked -= u64::from(reply.missing.units);
                self.reserved(reply);
            }
        }
    }

    /// Takes a turn ahead for a waiter.
    fn reserve(&self, missing: Missing) -> impl Future<Output = Reserved> + use<> {
        let (Place { line, policies, .. }, asked_at) = (&self.place, instant());
        let within = missing.deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(asked_at)
        });
        let check = Check::take_ahead(line.id.key, policies, missing.units, within);
        line.with(|line| line.sent(missing.number, asked_at));
        let answer = line.shared.store.ask(check);
        async move {
            Reserved {
                missing,
                asked_at,
                answer: answer.await,
            }
        }
    }

    fn reserved(&self, reply: Reserved) {
        let (place, now) = (&self.place, instant());
        let Missing {
            number,
            units,
            deadline,
        } = reply.missing;
        place.with(|line| line.replied(number, reply.asked_at));
        let decision = match reply.answer {
            Ok(decision) => decision,
            Err(error) => return place.fail(number, &error),
        };
        drop(place.with(|line| line.learn(&decision, now)));
        let wait = match decision.outcome() {
            Outcome::Allowed => Duration::ZERO,
            Outcome::Later { due_in } => due_in,
            Outcome::Denied { retry_after }
                if deadline.is_none_or(|deadline| now + retry_after <= deadline) =>
            {
                return self.ask_instead(number, decision);
            }
            Outcome::Denied { .. } | Outcome::ExceedsCapacity => {
                return place.refuse(number, Refusal::Denied(decision));
            }
        };
        let charge = Charge::new(place, decision, units, reply.asked_at, now + wait);
        let stays = false;
        place.with(|line| line.add_turn(number, Turn { charge, stays }));
        self.give();
        place.line.refund_superfluous();
    }

    /// Moves a waiter to the line of [`Questions`](super::Questions): the store supports no debt, or not as long a
    /// wait.
    fn ask_instead(&self, number: u64, denied: Decision) {
        let waiter = self.place.with(|line| line.remove(number)).flatten();
        if let (Some(waiter), Ok(runtime)) = (waiter, Handle::try_current()) {
            let Place {
                line,
                policies,
                queues,
                ..
            } = &self.place;
            let (id, policies) = (line.id.that_asks(), policies.clone());
            queues.enter(&runtime, id, policies, number, waiter, Some(denied));
        }
    }

    /// Refuses waiters whose deadline has passed because another waiter got their turn.
    fn refuse_overdue(&self) {
        let now = instant();
        let overdue = self.place.with(|line| line.overdue(now)).flatten();
        let Some((overdue, refusal)) = overdue else {
            return;
        };
        for waiter in overdue {
            waiter.answer(Err(refusal.clone()));
        }
        self.place.line.refund_superfluous();
    }

    /// Gives due turns to the first waiters.
    fn give(&self) {
        let now = instant();
        while let Some(given) = self.place.with(|line| line.next_due(now)).flatten() {
            self.place.line.deliver(given, None);
        }
    }
}
