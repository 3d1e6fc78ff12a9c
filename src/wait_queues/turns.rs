//! Lines by turns. Each turn has a task, from the check that takes it ahead until a waiter has its permit or the turn is
//! refunded. Its number is that of the waiter for which it was requested.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::permit::Permit;
use super::{LineRef, Refusal, checks, spawn};
use crate::error::StoreError;
use crate::limit::{Charge, Check, Decision, Policies};
use crate::util::instant;

/// Returns `true` if a store may reserve turns under these policies. A pause must also hold the requests that wait
/// already, so nothing is reserved under it.
pub(super) fn are_reserved(policies: &Policies) -> bool {
    let mut each = policies.iter();
    each.all(|policy| policy.frees().is_gradual() && !policy.is_pause())
}

/// The check that takes a turn ahead for a waiter with this deadline.
pub(super) fn check(line: &LineRef, cost: u32, deadline: Option<Instant>) -> Check {
    let within = deadline.map_or(Duration::MAX, |deadline| {
        deadline.saturating_duration_since(instant())
    });
    Check::take_ahead(line.id.key, &line.policies, cost, within)
}

/// Requests a turn for a waiter with this deadline. The line counts it as requested already.
pub(super) fn request(line: LineRef, number: u64, deadline: Option<Instant>) {
    spawn(line.clone(), async move {
        let (cost, sent_at) = (line.id.cost.unwrap_or(0), instant());
        match line.send(check(&line, cost, deadline)).await {
            Ok(decision) if decision.granted() > 0 => {
                let charge = Charge::new(line.id.key, decision, cost, sent_at);
                held(&line, number, charge).await;
            }
            answer => not_reserved(&line, number, deadline, answer),
        }
    });
}

/// Continues with a turn that was taken ahead already.
pub(super) fn hold(line: LineRef, number: u64, charge: Charge) {
    let task = line.clone();
    spawn(line, async move { held(&task, number, charge).await });
}

/// Handles a reply without a turn, to a request for a waiter with this deadline.
fn not_reserved(
    line: &LineRef,
    number: u64,
    deadline: Option<Instant>,
    answer: Result<Decision, StoreError>,
) {
    let now = instant();
    let wait = answer.as_ref().ok().and_then(Decision::retry_after);
    let is_in_time = wait.is_some_and(|wait| deadline.is_none_or(|at| now + wait <= at));
    let (refused, starts) = line.queues.with(&[line.id], |lines| {
        let here = lines.each.entry(line.id).or_default();
        here.requested.remove(&number);
        if let Ok(denied) = &answer {
            here.learn(denied, now);
        }
        here.refund_superfluous();
        let lacking = here.pop_lacking((!is_in_time).then_some(number));
        let refused = match (lacking, &answer) {
            // The store reserves none, or none so far ahead; or it was too late for a waiter that has left.
            (Some((other, waiter)), Ok(denied)) if is_in_time || other != number => {
                let denied = Some(denied).filter(|_| is_in_time);
                let waiter = Some((other, waiter));
                return (None, checks::add(lines, &line.any_cost(), waiter, denied));
            }
            (lacking, _) => lacking,
        };
        // After a failure, the next ones wait by checks, so that only one at a time tries the store.
        let any_cost = line.any_cost();
        let starts = answer.is_err() && checks::add(lines, &any_cost, None, None);
        (refused, starts)
    });
    let failures = u32::from(answer.is_err());
    if let Some((_, waiter)) = refused {
        waiter.answer(Err(match answer {
            Ok(denied) => Refusal::Denied(denied),
            Err(error) => Refusal::Failed(error),
        }));
    }
    if starts {
        checks::start(line.any_cost(), failures);
    }
}

/// Waits until a reserved turn is due, and gives it to the first waiter.
async fn held(line: &LineRef, number: u64, charge: Charge) {
    let now = instant();
    let due = now + charge.decision().due_in().unwrap_or_default();
    let (refund, refunded) = oneshot::channel();
    line.with(|line| {
        line.learn(charge.decision(), now);
        line.requested.remove(&number);
        line.held.insert((due, number), Some(refund));
        line.refund_superfluous();
    });
    let cost = charge.cost();
    let mut permit = Permit::new(line.clone(), charge, due, None);
    let is_refunded = due > now && timeout_at(due, refunded).await.is_ok();
    if is_refunded {
        let (sender, receiver) = oneshot::channel();
        line.queues.ops.put(permit.refund().then(move |answer| {
            let _ = sender.send(answer.is_ok_and(|decision| decision.granted() == 0));
        }));
        if receiver.await != Ok(true) || due <= instant() {
            return;
        }
        // Rejected: a later turn of another instance depends on it. The first waiter gets it when it is due.
        line.with(|line| line.held.insert((due, number), None));
        sleep_until(due).await;
    }
    let waiter = line.with(|line| {
        line.held.remove(&(due, number))?;
        line.pop(cost)
    });
    match waiter {
        Some(waiter) => waiter.answer(Ok(permit.unused())),
        // Passes it on or refunds it, unless its refund was rejected.
        None => drop(permit),
    }
}
