//! Waits for replies on a runtime that may be busy.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::task::coop::{has_budget_remaining, unconstrained};
use tokio::time::{Instant, Sleep, sleep_until};

use super::instant;

pin_project! {
    /// Resolves to the output of a future, or to the reason for [none](NoOutput) at the end of a wait.
    ///
    /// While handlers keep the threads of a runtime, its timers are noticed late. The reply may have arrived long before,
    /// but the task that reads it waits for a thread too, even if this task happens to be in time. So the wait is divided
    /// into looks. If one of them is late, a few more follow the end, its graces, until looks have been in time for as long
    /// as the whole wait. The runtime polls its sockets before a timer fires, and other tasks run between two late looks,
    /// so a reply that has arrived is read within a few graces. Tokio does not guarantee that.
    pub(crate) struct Patient<F> {
        #[pin]
        future: F,
        // `None` if it is too far to express.
        end: Option<Instant>,
        // The next look. Set at the first poll without an output.
        #[pin]
        timer: Option<Sleep>,
        pause: Duration,
        graces_left: u32,
        // Number of looks in time since the last late one.
        in_time: u32,
        was_late: bool,
        delay: Duration,
    }
}

/// Why a wait has ended without an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoOutput {
    /// The time is up, and the runtime was in time for as long as the wait.
    TimeUp,
    /// The runtime was late. The future may have an output as soon as the runtime has time for it.
    RuntimeLate,
}

/// Number of looks in a wait.
const LOOKS: u32 = 8;
/// Maximum delay of a look in time. Tokio's timers are exact to a millisecond.
const IN_TIME: Duration = Duration::from_millis(5);

/// Waits for a future until `time` has passed since this call. If the runtime is late, waits for at most this number of
/// further looks, each an eighth of `time` and its delay after the one before.
pub(crate) fn patient<F: Future>(time: Duration, graces: u32, future: F) -> Patient<F> {
    Patient {
        future,
        end: instant().checked_add(time),
        timer: None,
        pause: time / LOOKS,
        graces_left: graces,
        in_time: 0,
        was_late: false,
        delay: Duration::ZERO,
    }
}

impl<F: Future> Patient<F> {
    pub(crate) fn future(self: Pin<&mut Self>) -> Pin<&mut F> {
        self.project().future
    }

    /// Returns the sum of the delays of all looks, or `None` if all were in time.
    pub(crate) fn late_by(&self) -> Option<Duration> {
        if self.was_late {
            Some(self.delay)
        } else {
            None
        }
    }

    /// Resolves at the next look: to `None` if another one follows. `had_budget` is whether the task had some before the
    /// future was polled.
    fn poll_look(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        had_budget: bool,
    ) -> Poll<Option<NoOutput>> {
        let mut this = self.project();
        let Some(end) = *this.end else {
            return Poll::Pending;
        };
        if this.timer.is_none() {
            let first = end.min(instant() + *this.pause);
            this.timer.set(Some(sleep_until(first)));
        }
        let Some(mut timer) = this.timer.as_pin_mut() else {
            return Poll::Pending;
        };
        // If the future has used up the budget of this task: data that never end must not end all looks. If others have, the
        // output may be there without being seen.
        if had_budget {
            ready!(Pin::new(&mut unconstrained(timer.as_mut())).poll(cx));
        } else {
            ready!(timer.as_mut().poll(cx));
        }
        let now = instant();
        let delay = now.saturating_duration_since(timer.deadline());
        *this.delay += delay;
        if delay > IN_TIME {
            *this.was_late = true;
            *this.in_time = 0;
        } else {
            *this.in_time += 1;
        }
        if now < end {
            timer.reset(end.min(now + *this.pause));
            return Poll::Ready(None);
        }
        if !*this.was_late || *this.in_time >= LOOKS {
            return Poll::Ready(Some(NoOutput::TimeUp));
        }
        if *this.graces_left == 0 {
            return Poll::Ready(Some(NoOutput::RuntimeLate));
        }
        *this.graces_left -= 1;
        timer.reset(now + *this.pause);
        Poll::Ready(None)
    }
}

impl<F: Future> Future for Patient<F> {
    type Output = Result<F::Output, NoOutput>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut end = None;
        let had_budget = has_budget_remaining();
        loop {
            // Also after a look: the output may have arrived between the two polls.
            if let Poll::Ready(output) = self.as_mut().future().poll(cx) {
                return Poll::Ready(Ok(output));
            }
            if let Some(reason) = end {
                return Poll::Ready(Err(reason));
            }
            end = ready!(self.as_mut().poll_look(cx, had_budget));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::consume_budget;
    use tokio::time::timeout;

    use super::*;

    /// Uses up the budget of its task at each poll.
    struct Endless;

    impl Future for Endless {
        type Output = ();

        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            while std::pin::pin!(consume_budget()).poll(cx).is_ready() {}
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn work_without_end_ends_no_look() {
        let waiting = patient(Duration::from_millis(20), 2, Endless);
        let ended = timeout(Duration::from_secs(20), waiting).await;
        assert!(ended.expect("the time is up").is_err());
    }
}
