//! The task of a line that reserves turns.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};

use super::line::{Missing, Then, Todo};
use super::permit::Charge;
use super::{Permit, Place, Refusal};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Outcome};
use crate::util::instant;

/// The reply to a check that took a turn ahead.
struct Reply {
    missing: Missing,
    asked_at: Instant,
    answer: Result<Decision, StoreError>,
}

/// Runs until the line ends, or until it must poll. Returns the place in the second case.
pub(super) async fn run(mut place: Place) -> Option<Place> {
    let wake = place.with(|line| Arc::clone(&line.wake))?;
    let mut replies = FuturesUnordered::new();
    loop {
        let todo = place.with(|line| line.turn(instant()))?;
        let Todo {
            reserve,
            give,
            refund,
            refund_turns,
            refuse,
            then,
        } = todo;
        for missing in reserve {
            replies.push(send(&place, missing));
        }
        for (waiter, charge) in give {
            waiter.answer(Ok(Permit::new(place.line.clone(), charge, None)));
        }
        for charge in refund {
            place.line.queues.refunds.put(charge.refund());
        }
        for turn in refund_turns {
            refund_turn(&place, turn);
        }
        place.refuse_late(refuse);
        let wakes_at = match then {
            Then::Sleep(wakes_at) => wakes_at,
            Then::Check => return Some(place),
            Then::End if place.ends() => return None,
            Then::End => continue,
        };
        let mut due = pin!(wakes_at.map(sleep_until));
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
            replied(&place, reply);
        }
    }
}

/// Takes a turn ahead for a waiter.
fn send(place: &Place, missing: Missing) -> impl Future<Output = Reply> + use<> {
    let (line, asked_at) = (&place.line, instant());
    let within = missing.deadline.map_or(Duration::MAX, |deadline| {
        deadline.saturating_duration_since(asked_at)
    });
    let check = Check::take_ahead(line.id.key, &place.policies, missing.units, within);
    let answer = line.queues.shared.store.ask(check);
    async move {
        Reply {
            missing,
            asked_at,
            answer: answer.await,
        }
    }
}

/// Handles the reply to [`send`].
fn replied(place: &Place, reply: Reply) {
    let Reply {
        missing, asked_at, ..
    } = reply;
    let now = instant();
    place.with(|line| line.replied(&missing));
    let decision = match reply.answer {
        Ok(decision) => decision,
        Err(error) => return place.fail(missing.number, &error),
    };
    drop(place.with(|line| line.learn(&decision, now)));
    let wait = match decision.outcome() {
        Outcome::Allowed => Duration::ZERO,
        Outcome::Later { due_in } => due_in,
        Outcome::Denied { retry_after } => {
            let free_at = now + retry_after;
            if missing.deadline.is_some_and(|deadline| deadline < free_at) {
                place.refuse(missing.number, Refusal::Denied(decision));
            } else {
                place.with(|line| line.poll_instead(&missing, free_at));
            }
            return;
        }
        Outcome::ExceedsCapacity => {
            return place.refuse(missing.number, Refusal::Denied(decision));
        }
    };
    let charge = Charge::new(place, decision, missing.units, asked_at, now + wait);
    place.with(|line| line.add_turn(charge));
}

/// Refunds a turn that no waiter needs. If the store rejects that, because a later turn of another instance depends on
/// this one, the line keeps it for the next waiter.
fn refund_turn(place: &Place, turn: Charge) {
    let (line, kept) = (place.line.clone(), turn.clone());
    let refund = turn.refund().then(move |answer| {
        let stays = answer.is_ok_and(|decision| decision.granted() == 0);
        line.with(|line| line.refunded(stays.then_some(kept)));
    });
    place.line.queues.refunds.put(refund);
}
