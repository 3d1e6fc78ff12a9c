//! The queue with stores that reply immediately or on demand, and on runtimes that shut down.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::*;
use crate::limit::{Align, Check, Key, Policies, Policy, Quota, Strategy};
use crate::store::{Answer, LocalStore, MockStore, Store, op_queue};

impl OpQueue {
    fn send(&self, check: Check) {
        self.put(PendingOp::of_check(check));
    }

    fn send_then(&self, check: Check, then: impl FnOnce(Reply) + Send + 'static) {
        self.put(PendingOp::of_check(check).then(then));
    }
}

/// Receives each check that the queue sends. The test sends the reply.
struct SentChecks(mpsc::UnboundedReceiver<(Check, oneshot::Sender<Reply>)>);

impl SentChecks {
    async fn next(&mut self) -> (u32, oneshot::Sender<Reply>) {
        // Fail instead of hanging if the check never arrives.
        let (check, answer) = timeout(Duration::from_secs(20), self.0.recv())
            .await
            .expect("a check arrives")
            .unwrap();
        (check.cost(), answer)
    }

    /// Returns the cost of each check sent so far, with the sender of its reply.
    fn take_all(&mut self) -> Vec<(u32, oneshot::Sender<Reply>)> {
        std::iter::from_fn(|| self.0.try_recv().ok())
            .map(|(check, answer)| (check.cost(), answer))
            .collect()
    }
}

fn queue_of_channel() -> (OpQueue, SentChecks, Arc<Failures>) {
    let (sender, sent) = mpsc::unbounded_channel();
    let failures = Arc::new(Failures::default());
    let send_check = move |check| {
        let (answer, reply) = oneshot::channel();
        sender.send((check, answer)).unwrap();
        SentCheck::Pending(Box::pin(async { reply.await.unwrap() }))
    };
    let observer = Arc::clone(&failures) as Arc<dyn Observer>;
    (
        OpQueue::new(send_check, Some(observer)),
        SentChecks(sent),
        failures,
    )
}

#[derive(Default)]
struct Failures(AtomicU32);

impl Observer for Failures {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { key, .. } = *event {
            assert_eq!(key, Some(&Key::GLOBAL));
            self.0.fetch_add(1, Relaxed);
        }
    }
}

fn policies() -> Policies {
    Policy::new(
        "test",
        Strategy::FixedWindow(Align::FirstHit),
        Quota::per_minute(1_000_000),
    )
    .unwrap()
    .into()
}

fn charge(cost: u32) -> Check {
    Check::charge(Key::GLOBAL, &policies(), cost)
}

fn grant(cost: u32) -> Reply {
    Ok(MockStore::new().check(charge(cost)).now())
}

impl<F> Answer<F> {
    fn now(self) -> Decision {
        match self {
            Answer::Ready { answer } => answer.unwrap(),
            Answer::Pending { .. } => panic!("no answer yet"),
        }
    }
}

fn not_sent() -> Reply {
    Err(StoreError::new(ErrorKind::Unreachable).not_sent())
}

async fn until_idle(queue: &OpQueue) {
    while queue.shared.is_busy() {
        sleep(LINGER).await;
    }
}

fn grant_all(checks: Vec<(u32, oneshot::Sender<Reply>)>) -> Vec<u32> {
    checks
        .into_iter()
        .map(|(cost, answer)| answer.send(grant(cost)).map_or(0, |()| cost))
        .collect()
}

#[test]
fn an_immediate_store_needs_no_runtime() {
    let store = LocalStore::default();
    let queue = op_queue(store.clone(), None);
    let answered = Arc::new(AtomicU32::new(0));
    let in_callback = Arc::clone(&answered);
    queue.send_then(charge(3), move |answer| {
        in_callback.store(answer.unwrap().granted(), Relaxed)
    });
    assert_eq!(answered.load(Relaxed), 3);
    let left = store
        .check(Check::peek(Key::GLOBAL, &policies(), 0))
        .now()
        .remaining();
    assert_eq!((left, queue.shared.is_busy()), (999_997, false));
}

/// All but renewals and blocks are owed, and a release only until its first reply.
#[tokio::test(start_paused = true)]
async fn operations_are_owed_until_their_reply() {
    let (queue, mut checks, _) = queue_of_channel();
    assert_eq!(queue.owed(), 0);
    queue.send(charge(1));
    queue.send(charge(2));
    let slot = Policies::from(Policy::in_flight("slots", 9).unwrap());
    let id = Check::take(Key::GLOBAL, &slot, 1).slot().unwrap();
    queue.send(Check::renew(Key::GLOBAL, &slot, id));
    queue.put(PendingOp::of_check(Check::release(Key::GLOBAL, &slot, id)).repeated());
    queue.send_now(PendingOp::of_check(Check::take(Key::GLOBAL, &slot, 3)));
    queue.send_now(PendingOp::of_check(Check::up_to(Key::GLOBAL, &slot, 4)));
    assert_eq!(queue.owed(), 4);

    assert_eq!(grant_all(checks.take_all()), [1, 2, 0, 0, 3, 4]);
    sleep(LINGER).await;
    assert!(queue.owed() == 0 && queue.shared.is_busy());
    for _ in 0..2 {
        let (_, answer) = checks.next().await;
        assert_eq!(queue.owed(), 0, "a repeated release");
        answer.send(grant(0)).unwrap();
    }
    until_idle(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn expired_operations_are_not_sent() {
    let (queue, mut checks, failures) = queue_of_channel();
    let expired = PendingOp::of_check(charge(1));
    tokio::time::advance(Duration::from_secs(3_600)).await;
    queue.put(expired);
    assert_eq!((checks.take_all().len(), failures.0.load(Relaxed)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn refunds_are_sent_without_delay() {
    const ALL: u32 = MAX_FLIGHTS as u32 + 44;
    let (queue, mut checks, failures) = queue_of_channel();
    for cost in 1..=ALL {
        queue.send(charge(cost));
    }
    let mut sent = checks.take_all();
    assert_eq!(sent.len(), MAX_FLIGHTS, "no more are in flight");
    sleep(LINGER * 3).await;
    assert!(checks.take_all().is_empty());
    assert_eq!(
        grant_all(sent.drain(..44).collect()),
        (1..=44).collect::<Vec<_>>()
    );
    sleep(LINGER).await;
    let rest = checks.take_all();
    assert_eq!(rest.len(), 44);
    grant_all(sent);
    grant_all(rest);
    until_idle(&queue).await;
    assert_eq!(failures.0.load(Relaxed), 0);
    queue.send(charge(7));
    assert_eq!(grant_all(checks.take_all()), [7]);
}

/// A tick renews many slots: refunds do not wait behind them.
#[tokio::test(start_paused = true)]
async fn renewals_leave_room_for_refunds() {
    let (queue, mut checks, _) = queue_of_channel();
    let slot = Policies::from(Policy::in_flight("slots", 9).unwrap());
    let id = Check::take(Key::GLOBAL, &slot, 1).slot().unwrap();
    let room = queue.renewal_room();
    for _ in 0..MAX_FLIGHTS {
        queue.send(Check::renew(Key::GLOBAL, &slot, id));
    }
    let renewals = checks.take_all();
    assert_eq!(renewals.len(), MAX_FLIGHTS / 2);
    assert_eq!(room - queue.renewal_room(), MAX_FLIGHTS / 2);
    queue.send(charge(7));
    assert_eq!(grant_all(checks.take_all()), [7]);
    grant_all(renewals);
    sleep(LINGER).await;
    assert_eq!(grant_all(checks.take_all()).len(), MAX_FLIGHTS / 2);
    until_idle(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn unsent_refunds_are_retried_while_they_matter() {
    let (queue, mut checks, failures) = queue_of_channel();
    let answered = Arc::new(AtomicU32::new(0));
    let in_callback = Arc::clone(&answered);
    queue.send_then(charge(1), move |answer| {
        in_callback.store(1 + u32::from(answer.is_err()), Relaxed)
    });
    for _ in 0..5 {
        checks.next().await.1.send(not_sent()).unwrap();
    }
    let (_, answer) = checks.next().await;
    // An operation that waits for its retry must not delay another.
    queue.send(charge(2));
    let (cost, other) = checks.next().await;
    assert_eq!(cost, 2);
    answer.send(grant(1)).unwrap();
    other.send(grant(2)).unwrap();
    until_idle(&queue).await;
    assert_eq!((answered.load(Relaxed), failures.0.load(Relaxed)), (1, 0));

    let in_callback = Arc::clone(&answered);
    queue.send_then(charge(3), move |answer| {
        in_callback.store(10 + u32::from(answer.is_err()), Relaxed)
    });
    let start = instant();
    while answered.load(Relaxed) == 1 {
        tokio::select! {
            (_, answer) = checks.next() => answer.send(not_sent()).unwrap(),
            () = sleep(LINGER) => {}
        }
    }
    let minute = instant() - start;
    assert!(
        minute >= Duration::from_secs(60) && minute < Duration::from_secs(62),
        "{minute:?}"
    );
    assert_eq!((answered.load(Relaxed), failures.0.load(Relaxed)), (11, 1));
    until_idle(&queue).await;
}

/// With a burst, a charge counts for far longer than a period.
#[tokio::test(start_paused = true)]
async fn retries_of_bursts_outlast_a_period() {
    let (queue, mut checks, failures) = queue_of_channel();
    let policies = Policy::new("test", Strategy::Gcra, Quota::per_second(1).burst(1_000))
        .unwrap()
        .into();
    queue.send(Check::charge(Key::GLOBAL, &policies, 500));
    let start = instant();
    while instant() - start < Duration::from_secs(5) {
        checks.next().await.1.send(not_sent()).unwrap();
    }
    checks.next().await.1.send(grant(500)).unwrap();
    until_idle(&queue).await;
    assert_eq!(failures.0.load(Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn refunds_from_outside_a_runtime_are_sent() {
    let (queue, mut checks, _) = queue_of_channel();
    queue.wake();
    let elsewhere = queue.clone();
    thread::spawn(move || elsewhere.send(charge(1)))
        .join()
        .unwrap();
    checks.next().await.1.send(not_sent()).unwrap();
    checks.next().await.1.send(grant(1)).unwrap();
    until_idle(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn unanswered_refunds_are_reported_not_repeated() {
    let (queue, mut checks, failures) = queue_of_channel();
    queue.send(charge(1));
    checks
        .next()
        .await
        .1
        .send(Err(StoreError::new(ErrorKind::Timeout)))
        .unwrap();
    until_idle(&queue).await;
    assert_eq!((checks.take_all().len(), failures.0.load(Relaxed)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn refunds_beyond_capacity_are_reported() {
    let (queue, mut checks, failures) = queue_of_channel();
    for _ in 0..MAX_FLIGHTS + CAPACITY + 10 {
        queue.send(charge(1));
    }
    assert_eq!(failures.0.load(Relaxed), 10, "the first ones were sent");
    while queue.shared.is_busy() {
        grant_all(checks.take_all());
        sleep(LINGER).await;
    }
    assert_eq!(failures.0.load(Relaxed), 10);
}

#[test]
fn the_next_runtime_sends_the_rest() {
    let (queue, mut checks, failures) = queue_of_channel();
    let first = Builder::new_current_thread().enable_all().build().unwrap();
    first.block_on(async {
        (1..=3).for_each(|cost| queue.send(charge(cost)));
        tokio::task::yield_now().await;
    });
    drop(first);
    let is_left = || queue.shared.is_busy() && !queue.shared.sender.is_running();
    assert!(is_left());
    queue.send(charge(4));
    assert!(is_left(), "no runtime: its reply is not read");
    let mut sent = checks.take_all();
    let (_, unsent) = sent.remove(0);
    unsent.send(not_sent()).unwrap();
    assert_eq!(grant_all(sent), [2, 3, 4]);

    let second = Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    second.block_on(async {
        queue.wake();
        let (cost, answer) = checks.next().await;
        answer.send(grant(cost)).unwrap();
        assert_eq!(cost, 1, "only the unsent check is sent again");
        until_idle(&queue).await;
    });
    assert_eq!(failures.0.load(Relaxed), 0);
}

/// There is only one sender at a time: work continues when the stalled runtime does.
#[test]
fn a_stalled_runtime_delays_retries() {
    let (queue, mut checks, failures) = queue_of_channel();
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let (still, other) = (runtime(), runtime());
    still.block_on(async { queue.send(charge(1)) });
    let (_, first) = checks.0.try_recv().unwrap();
    first.send(not_sent()).unwrap();
    let second = other.block_on(async {
        queue.send(charge(2));
        let (two, second) = checks.next().await;
        sleep(Duration::from_millis(100)).await;
        assert!(two == 2 && checks.take_all().is_empty());
        assert_eq!(other.metrics().num_alive_tasks(), 0);
        second
    });
    still.block_on(async {
        second.send(grant(2)).unwrap();
        let (one, answer) = checks.next().await;
        answer.send(grant(1)).unwrap();
        assert_eq!(one, 1);
        until_idle(&queue).await;
    });
    assert_eq!(failures.0.load(Relaxed), 0);
}

/// Several threads put operations while runtimes shut down: each operation is sent once.
#[test]
fn each_refund_is_sent_once() {
    let (queue, mut checks, failures) = queue_of_channel();
    let answers = std::thread::spawn(move || {
        let mut sum = 0_u64;
        while let Some((check, answer)) = checks.0.blocking_recv() {
            sum += u64::from(check.cost());
            let _ = answer.send(grant(check.cost()));
        }
        sum
    });
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let queue = queue.clone();
            std::thread::spawn(move || {
                for _ in 0..20 {
                    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        for _ in 0..25 {
                            queue.send(charge(1));
                            tokio::task::yield_now().await;
                        }
                    });
                }
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    let last = Builder::new_current_thread().enable_all().build().unwrap();
    last.block_on(async {
        queue.wake();
        until_idle(&queue).await;
    });
    drop(queue);
    assert_eq!(
        (answers.join().unwrap(), failures.0.load(Relaxed)),
        (2_000, 0)
    );
}

/// The next sender awaits the replies that the last one cannot.
#[test]
fn replies_of_ended_runtimes_are_read() {
    let (queue, mut checks, _) = queue_of_channel();
    let (answered, mut answer_read) = oneshot::channel();
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    first.block_on(async {
        queue.send_then(charge(1), move |answer| {
            answered.send(answer.map(drop)).unwrap()
        });
        // The sender awaits its reply.
        sleep(LINGER * 2).await;
    });
    let (_, reply) = checks.0.try_recv().unwrap();
    drop(first);
    runtime().block_on(async {
        reply.send(grant(1)).unwrap();
        queue.wake();
        until_idle(&queue).await;
    });
    assert!(
        matches!(answer_read.try_recv(), Ok(Ok(()))),
        "its reply is read"
    );
}

/// Depending on the cost, panics on the check, panics in the future, fails, or replies. The observer always panics.
#[derive(Clone)]
struct Panicking;

impl Store for Panicking {
    type Future = Pin<Box<dyn Future<Output = Reply> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        assert_ne!(check.cost(), 1, "a fault of the store");
        Answer::pending(Box::pin(async move {
            tokio::task::yield_now().await;
            assert_ne!(check.cost(), 2, "a fault of its future");
            if check.cost() == 3 {
                Err(StoreError::new(ErrorKind::Timeout))
            } else {
                grant(check.cost())
            }
        }))
    }
}

impl Observer for Panicking {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { .. } = *event {
            panic!("a fault of the observer");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_costs_one_event() {
    let queue = op_queue(Panicking, Some(Arc::new(Panicking)));
    let answered = Arc::new(Mutex::new(vec![]));
    // In the second round the sender handles the operations.
    for cost in [1, 2, 3, 4, 1, 2, 3, 4] {
        let answered = Arc::clone(&answered);
        queue.send_then(charge(cost), move |answer| {
            lock(&answered).push((cost, answer.is_ok()))
        });
    }
    until_idle(&queue).await;
    let mut answered = std::mem::take(&mut *lock(&answered));
    answered.sort_unstable();
    assert_eq!(
        answered,
        [1, 1, 2, 2, 3, 3, 4, 4].map(|cost| (cost, cost == 4))
    );
}

/// The callback holds the queue, as that of [`RequestCost::reserve`](crate::settle::RequestCost::reserve) does.
#[test]
fn awaited_operations_do_not_leak_the_queue() {
    let (queue, mut checks, _) = queue_of_channel();
    let (weak, held) = (queue.downgrade(), queue.clone());
    let take = Check::take(Key::GLOBAL, &policies(), 1);
    let op = PendingOp::of_check(take).then(move |_| drop(held));
    let runtime = Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        queue.send_now(op);
        tokio::task::yield_now().await;
    });
    drop(queue);
    assert!(
        weak.upgrade().is_some() && checks.take_all().len() == 1,
        "the reply is awaited"
    );
    drop(runtime);
    assert!(weak.upgrade().is_none());
}

#[test]
fn abandoned_refunds_are_reported() {
    let (queue, mut checks, _) = queue_of_channel();
    let (answered, mut answer_read) = oneshot::channel();
    queue.send_then(charge(1), move |answer| {
        answered.send(answer.is_ok()).unwrap()
    });
    drop(queue);
    assert_eq!(
        (checks.take_all().len(), answer_read.try_recv()),
        (1, Ok(false))
    );
}

/// A check of several keys is owed until its callback has handled the reply, which may refund the grant.
#[tokio::test]
async fn a_joint_reservation_is_owed() {
    let (answer, reply) = oneshot::channel::<()>();
    let reply = Mutex::new(Some(reply));
    let send_joint = move |joint: JointCheck| -> PendingJointReply {
        let reply = lock(&reply).take();
        Box::pin(async move {
            reply.unwrap().await.unwrap();
            LocalStore::default().check_all(joint).await
        })
    };
    let send_check = |_| SentCheck::Replied(not_sent());
    let queue = OpQueue::with_joint(send_check, Some(Box::new(send_joint)), None);
    let list = policies();
    let joint = JointCheck::take([(Key::GLOBAL, &list)], 1).unwrap();
    let (done, handled) = oneshot::channel();
    let own = queue.clone();
    queue.send_all_now(joint, move |decided| {
        let _ = done.send((decided.is_ok(), own.owed()));
    });
    assert_eq!(queue.owed(), 1);
    answer.send(()).unwrap();
    assert_eq!(handled.await.unwrap(), (true, 1));
    while queue.owed() > 0 {
        sleep(LINGER).await;
    }
}
