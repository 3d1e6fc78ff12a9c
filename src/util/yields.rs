use std::future::poll_fn;
use std::mem;
use std::task::Poll;

/// Lets the other tasks run that are ready. Any thread of the runtime may then resume this one.
///
/// [`tokio::task::yield_now`] ties the task to its thread, until that thread has nothing else to run: a handler that keeps the thread would keep the task.
pub(crate) async fn yield_to_others() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
