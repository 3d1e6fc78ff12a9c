//! The task of a line that reserves turns.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};

use super::line::Turn;
use super::permit::Charge;
use super::{LineId, Permit, Place, Refusal, Shared};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Outcome};
use crate::refunds::RefundQueue;
use crate::util::instant;

pub(super) struct Turns {
    place: Place,
    cost: u32,
}

/// A reply to the check that took ahead for a waiter.
struct Reserved {
    number: u64,
    deadline: Option<Instant>,
    asked_at: Instant,
    answer: Result<Decision, StoreError>,
}

impl Turns {
    pub(super) fn new(place: Place) -> Self {
        let cost = place.id.turns_of.unwrap_or(0);
        Self { place, cost }
    }

    pub(super) async fn run(self) {
        let Some(wake) = self.place.line(|line| Arc::clone(&line.wake)) else {
            return;
        };
        let mut replies = FuturesUnordered::new();
        loop {
            let missing = self.place.line(|line| line.without_turn(replies.len()));
            for (number, deadline) in missing.unwrap_or_default() {
                replies.push(self.reserve(number, deadline));
            }
            self.give();
            if replies.is_empty() && self.place.ends() {
                return;
            }
            let next = self.place.line(|line| {
                let idle = line.remembers_until().filter(|_| replies.is_empty());
                line.due().or(idle)
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
                self.reserved(reply);
            }
        }
    }

    /// Takes ahead for this waiter.
    fn reserve(
        &self,
        number: u64,
        deadline: Option<Instant>,
    ) -> impl Future<Output = Reserved> + use<> {
        let (
            Place {
                queues,
                id,
                policies,
            },
            asked_at,
        ) = (&self.place, instant());
        let within = deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(asked_at)
        });
        let check = Check::take_ahead(id.key, policies, self.cost, within);
        let answer = queues.shared.store.ask(check);
        async move {
            Reserved {
                number,
                deadline,
                asked_at,
                answer: answer.await,
            }
        }
    }

    fn reserved(&self, reply: Reserved) {
        let (place, now) = (&self.place, instant());
        let Reserved {
            number,
            deadline,
            asked_at,
            ..
        } = reply;
        let decision = match reply.answer {
            Ok(decision) => decision,
            Err(error) => return place.fail(number, &error),
        };
        drop(place.line(|line| line.learn(&decision, now)));
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
        let charge = Charge::new(place, decision, self.cost, asked_at, now + wait);
        place.line(|line| {
            line.add_turn(
                number,
                Turn {
                    charge,
                    stays: false,
                },
            )
        });
        self.give();
        refund_last(&place.queues.shared, &place.queues.refunds, place.id);
    }

    /// Lets a waiter ask: the store knows no debt, or does not reserve as far ahead.
    fn ask_instead(&self, number: u64, denied: Decision) {
        let Place {
            queues,
            id,
            policies,
        } = &self.place;
        let waiter = self.place.line(|line| line.remove(number)).flatten();
        if let (Some(waiter), Ok(runtime)) = (waiter, Handle::try_current()) {
            let denied = Some(denied);
            queues.enter(
                &runtime,
                id.that_asks(),
                policies.clone(),
                number,
                waiter,
                denied,
            );
        }
    }

    /// Gives the turns that are due to the first in line.
    fn give(&self) {
        let now = instant();
        while let Some((charge, waiter)) = self.place.line(|line| line.next_due(now)).flatten() {
            // A turn for which nobody waits has expired.
            if let Some(waiter) = waiter {
                waiter.answer(Ok(Permit::new(&self.place, charge, None)));
            }
        }
    }
}

/// Refunds the last turn of a line, if more turns are reserved than are needed. If a later turn of another instance stands
/// on it, the line keeps it for whoever comes next.
pub(super) fn refund_last(shared: &Arc<Shared>, refunds: &Arc<dyn RefundQueue>, id: LineId) {
    let Some((number, charge)) = shared.with_line(&id, |line| line.superfluous()).flatten() else {
        return;
    };
    let (shared, again, kept) = (Arc::clone(shared), Arc::clone(refunds), charge.clone());
    let op = charge.refund().then(move |answer| {
        let stays = answer.is_ok_and(|decision| decision.granted() == 0);
        shared.with_line(&id, |line| {
            line.refunding -= 1;
            line.wake.notify.notify_one();
            if stays && kept.due > instant() {
                line.add_turn(
                    number,
                    Turn {
                        charge: kept,
                        stays,
                    },
                );
            }
        });
        refund_last(&shared, &again, id);
    });
    refunds.put(op);
}
