//! The rows of the matrix: each fault, its repair, and the promises that must hold.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tokio::task::block_in_place;
use tokio::time::sleep;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore, redis};

use crate::fault::{Admin, Fault};
use crate::load::{CALLERS, DEADLINE, HANDLER, Kind, Load, Pings, Setup, TASKS, peek};
use crate::proxy::{Mode, Proxy};
use crate::support::{RedisServer, until};
use crate::table::{Outcome, SLACK};

/// The promise is one second, and the table shows the real time; this allows for a busy machine.
const RECOVERY: Duration = Duration::from_secs(10);
/// Time that a stall may add: a failing probe, the longest delay before the next one, and the wait
/// for other instances.
const ATTEMPT: Duration = Duration::from_millis(1_500);

/// Passes all rows to another macro, which creates tests or a table.
macro_rules! rows {
    ($to:ident) => {
        $to! {
            killed_and_restarted_empty: "`kill -9`, back empty" => Fault::KilledEmpty;
            killed_and_restarted_with_its_data: "`kill -9`, back with its data" => Fault::Killed;
            frozen: "SIGSTOP, SIGCONT" => Fault::Frozen;
            connections_cut: "`CLIENT KILL TYPE normal`, every 50 ms" => Fault::Cut;
            slow: "50 ms slower" => Fault::Path(Mode::Delay(Duration::from_millis(50)));
            slow_by_about_the_deadline: "60 to 130 ms slower, bursts while degraded" => Fault::Path(Mode::Waver(Duration::from_millis(60), Duration::from_millis(130)));
            very_slow: "500 ms slower" => Fault::Path(Mode::Delay(Duration::from_millis(500)));
            cut_in_a_reply: "cut in the middle of a reply" => Fault::Path(Mode::Half);
            black_hole: "black hole" => Fault::Path(Mode::BlackHole);
            accepted_and_not_answered: "accepts and never answers" => Fault::Path(Mode::Silent);
            charged_and_not_answered: "charges, and the replies are lost" => Fault::Path(Mode::Swallow);
            refused: "refuses connections" => Fault::Path(Mode::Refuse);
            another_shape: "a reply of another shape" => Fault::Path(Mode::Answer(b"*1\r\n:1\r\n"));
            loading: "loading its data" => Fault::Path(Mode::Answer(b"-LOADING Redis is loading the dataset in memory\r\n"));
            too_many_clients: "`maxclients` reached" => Fault::Full;
            out_of_memory: "`maxmemory` reached, `noeviction`" => Fault::OutOfMemory;
            too_few_replicas: "`min-replicas-to-write` not met" => Fault::NoReplicas;
            read_only_replica: "a read-only replica" => Fault::Replica;
            script_flushed: "`SCRIPT FLUSH`, every 50 ms" => Fault::ScriptFlush;
            flushed: "`FLUSHALL`" => Fault::FlushAll;
            password_changed: "password changed" => Fault::Password;
            scripts_forbidden: "ACL without EVALSHA" => Fault::Forbidden;
            name_does_not_resolve: "the name does not resolve" => Fault::NoName;
            started_while_down: "down at the start" => Fault::StartDown;
        }
    };
}

rows!(table);

struct Scene {
    server: RedisServer,
    proxy: Proxy,
    admin: Admin,
}

impl Scene {
    async fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::KilledEmpty | Fault::Killed => self.server.kill(),
            Fault::Frozen => self.server.freeze(),
            Fault::Path(mode) => self.proxy.set(mode),
            _ => self.admin.inject(fault).await,
        }
    }

    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::KilledEmpty | Fault::Killed => block_in_place(|| self.server.restart()),
            Fault::Frozen => self.server.thaw(),
            Fault::Path(_) | Fault::StartDown => self.proxy.set(Mode::Pass),
            _ => self.admin.heal(fault).await,
        }
    }
}

/// Runs a row, and asserts the promises that hold in every row.
///
/// **How much may be granted.** A caller's limit, and additionally the grants of Redis that it has
/// lost. Beyond that:
///
/// - If Redis does not reply to a check, the instance decides and never reconciles the check, since
///   Redis may have charged it. When a call fails, each task of the instance may have such a check
///   in flight; afterwards one at a time, until the third consecutive call fails and the breaker
///   opens. So each opening costs an instance at most [`TASKS`] + 3 such checks. The observer
///   counts them.
/// - An instance continues from the last remaining count that it saw. It does not know the grants
///   of Redis since then: at most one request in flight per task, [`TASKS`] per instance, and it
///   takes its part of those.
/// - A charge that fails during reconciliation is not sent again. The observer counts these too. If
///   Redis is only slow, it was executed anyway.
/// - If Redis fails for some instances and replies to others, those have the whole remaining limit,
///   and each failed instance has its part of it: all parts but one, in the worst case. The same
///   if an instance comes back later than others wait: the machine stalls after the fault, or a new connection hangs
///   until its `connect_timeout`.
///
/// With [leased](leased) callers, units charged ahead are added, except for callers that have used
/// up their limits. The requests for blocks and the refunds of unspent units fail too.
pub async fn run(fault: Fault) -> Outcome {
    run_as(fault, fault.setup()).await
}

/// Runs a row with instances whose handlers keep the threads of their runtimes.
#[allow(dead_code, reason = "not all targets have it")]
pub async fn busy(fault: Fault) -> Outcome {
    let setup = fault.setup();
    run_as(
        fault,
        Setup {
            busy: true,
            ..setup
        },
    )
    .await
}

/// Runs a row with leased callers.
#[allow(dead_code, reason = "not all targets have it")]
pub async fn leased(fault: Fault) -> Outcome {
    run_as(
        fault,
        Setup {
            leased: true,
            ..fault.setup()
        },
    )
    .await
}

async fn run_as(fault: Fault, setup: Setup) -> Outcome {
    let args: &[&str] = match fault {
        Fault::Killed => &["--appendonly", "yes", "--appendfsync", "always"],
        _ => &[],
    };
    let server = block_in_place(|| RedisServer::start_with(args));
    let proxy = Proxy::start(
        server.port(),
        if fault == Fault::StartDown {
            Mode::Refuse
        } else {
            Mode::Pass
        },
    );
    let url = match fault {
        Fault::Path(_) | Fault::StartDown => proxy.url(),
        Fault::NoName => "redis://redis.invalid/".to_owned(),
        _ => server.url(),
    };
    let admin = Admin::of(&server).await;
    let mut scene = Scene {
        server,
        proxy,
        admin,
    };
    let mut load = Load::new(&url, setup);
    let instances = std::sync::Arc::clone(&load.instances);
    let pings = Pings::start(&scene.server.url(), &load.sums);

    if fault.starts_down() {
        load.tighten();
        load.start();
    } else {
        load.introduce().await;
        load.start();
        // Leased callers send few checks to Redis.
        let some = if setup.leased { 50 } else { 500 };
        until("every instance denies the spent callers", async || {
            instances.iter().all(|instance| {
                instance.by_redis() > some && instance.has_denied(Kind::Spent, Source::Redis)
            })
        })
        .await;
    }

    // On a machine that stalls, checks of some instances may fail before any limit is used up.
    let early = load.total(|events| &events.failed);
    let opened_early = load.total(|events| &events.degraded);
    let mut forgotten = vec![0; CALLERS.len()];
    if fault.forgets() {
        // Including units charged ahead.
        let redis = asker(&scene).await;
        for (i, count) in forgotten.iter_mut().enumerate() {
            *count = counted(&redis, i).await;
        }
    }
    let since = Instant::now();
    if !fault.is_unnoticed() {
        pings.turn();
    }
    scene.inject(fault).await;
    if fault.forgets() {
        // A grant that is recorded only now is lost too.
        forgotten
            .iter_mut()
            .zip(&load.sums.redis)
            .for_each(|(count, sum)| *count = sum.load(SeqCst).max(*count));
    }
    load.tighten();
    if matches!(fault, Fault::Path(Mode::Waver(..))) {
        load.burst();
    }
    let mut noticed = None;
    if fault.is_outage() {
        until("every instance is degraded", async || {
            instances.iter().all(|i| i.store.is_degraded())
        })
        .await;
        noticed = Some(since.elapsed());
        until("every part is used up", async || {
            instances
                .iter()
                .all(|i| i.has_denied(Kind::Tight, Source::Local))
        })
        .await;
    }
    while since.elapsed() < fault.lasts() {
        // The length of the fault.
        sleep(Duration::from_millis(50)).await;
        if fault.is_repeated() {
            scene.inject(fault).await;
        }
    }

    scene.heal(fault).await;
    if !fault.is_unnoticed() {
        pings.turn();
    }
    let healed = Instant::now();
    let slots_before = load.sums.late_slots();
    let by_redis: Vec<u64> = instances
        .iter()
        .map(|instance| instance.by_redis())
        .collect();
    let mut recovery = None;
    if fault != Fault::NoName {
        // Not at the same moment: on a busy machine an instance may become degraded again.
        let back: Vec<AtomicBool> = by_redis.iter().map(|_| AtomicBool::new(false)).collect();
        until("every instance is back", async || {
            for ((instance, before), back) in instances.iter().zip(&by_redis).zip(&back) {
                back.fetch_or(
                    !instance.store.is_degraded() && instance.by_redis() > *before,
                    SeqCst,
                );
            }
            back.iter().all(|back| back.load(SeqCst))
        })
        .await;
        recovery = Some(healed.elapsed());
        // Request all units that Redis still has.
        until("Redis denies the tight callers", async || {
            instances
                .iter()
                .all(|instance| instance.has_denied(Kind::Tight, Source::Redis))
        })
        .await;
    }
    load.stop().await;

    let sums = &load.sums;
    let get = |of: &[std::sync::atomic::AtomicU64], i: usize| of[i].load(SeqCst);
    let failed = load.total(|events| &events.failed);
    let opened = load.total(|events| &events.degraded);
    let worst = Duration::from_micros(sums.worst.load(SeqCst));
    assert_eq!(
        sums.errors.load(SeqCst),
        0,
        "requests failed because of the limiter"
    );
    let may_take = RECOVERY + ATTEMPT * sums.stalls() as u32;
    assert!(
        recovery.is_none_or(|recovery| recovery < may_take),
        "back after {recovery:?}, of {may_take:?}"
    );
    let stalled = sums.longest_stall();
    let late = instances
        .iter()
        .map(|instance| Duration::from_micros(instance.events.late.load(SeqCst)));
    let late = late.max().unwrap_or_default();
    // On a busy runtime, a deadline of graces follows, and then a wait for a thread.
    let wait = if setup.busy {
        2 * DEADLINE + late + HANDLER * 16
    } else {
        DEADLINE + stalled
    };
    assert!(
        worst <= wait + SLACK,
        "a request waited for {worst:?}; the machine stalled for {stalled:?}, and a runtime for {late:?}"
    );
    println!(
        "noticed after {noticed:?}, back after {recovery:?}, longest wait {worst:?}, late by {late:?}, {failed} unanswered"
    );
    // Few checks of leased callers fail, possibly none with this error.
    let kinds = fault.shows_as();
    if !setup.leased && !kinds.is_empty() {
        let seen: Vec<_> = instances
            .iter()
            .flat_map(|i| i.events.kinds.lock().unwrap().clone())
            .collect();
        assert!(
            kinds.iter().any(|kind| seen.contains(kind)),
            "no check failed with any of {kinds:?}, but with {seen:?}"
        );
    }
    // Checks that a stall of the machine may have made late: all in flight. Redis's own stall may
    // have been longer.
    let slots = sums.late_slots();
    let late = (slots + slots.min(1)) * (instances.len() * TASKS) as u64;
    if fault.is_unnoticed() {
        let of_time = instances.iter().all(|i| {
            i.events
                .kinds
                .lock()
                .unwrap()
                .iter()
                .all(|k| *k == ErrorKind::Timeout)
        });
        assert!(
            failed <= late && of_time,
            "{failed} checks failed although Redis decides; at most {late} may"
        );
    }

    if fault != Fault::NoName {
        reconciled(&forgotten, &scene, &load, setup.leased).await;
    }
    let (dropped, charged) = (
        load.total(|events| &events.dropped),
        load.total(|events| &events.charged),
    );
    // After Redis has lost their counts, callers with used-up limits are granted units again.
    let unanswered = if fault.forgets() { failed } else { early };
    let second_helping = unanswered + opened_early * Kind::Spent.limit() / instances.len() as u64;
    let (mut granted, mut allowed) = (0, 0);
    for (i, (name, kind)) in CALLERS
        .iter()
        .enumerate()
        .filter(|(_, (_, kind))| *kind != Kind::Ample)
    {
        let (of_it, may) = (
            get(&sums.redis, i) + get(&sums.local, i),
            kind.limit() + forgotten[i],
        );
        if *kind == Kind::Spent && !fault.starts_down() {
            let (redis, local) = (get(&sums.redis, i), get(&sums.local, i));
            assert!(
                of_it <= may + second_helping,
                "an outage is a second helping: {name} was granted {of_it} of {may}, {redis} by Redis and {local} locally; \
                 {early} checks had not been answered before, and {opened_early} instances gone on by themselves"
            );
        }
        granted += of_it;
        allowed += may;
    }
    let count = instances.len() as u64;
    let mut bound = failed + count * TASKS as u64;
    if !fault.only_delays() {
        bound += dropped;
    }
    // An instance that stalls may come back later than the others wait for it.
    let comes_late = sums.late_slots() > slots_before;
    if fault.is_partial() || fault.hangs() || comes_late {
        let tight: u64 = CALLERS
            .iter()
            .filter(|(_, kind)| *kind == Kind::Tight)
            .map(|(_, kind)| kind.limit())
            .sum();
        bound += tight - tight / count;
    }
    assert!(
        granted <= allowed + bound,
        "granted {granted} of {allowed}, {bound} more at most"
    );
    if fault.is_outage() {
        let (failed, opened) = (failed - early, opened - opened_early);
        // Per caller, a request for a block, and the unspent parts of up to four blocks.
        let of_blocks = if setup.leased {
            5 * CALLERS.len() as u64
        } else {
            0
        };
        let in_doubt = load.total(|events| &events.in_doubt);
        let most = opened * (TASKS as u64 + 3 + of_blocks) + late + in_doubt;
        assert!(
            failed <= most,
            "{failed} checks were not answered, of {most} that may be"
        );
    }

    let (healthy_p99, open_p99) = sums.p99();
    Outcome {
        requests: sums.requests.load(SeqCst),
        errors: sums.errors.load(SeqCst),
        worst,
        granted,
        allowed,
        bound,
        unanswered: failed,
        reconciled: charged,
        recovery,
        healthy_p99,
        open_p99,
        others: None,
    }
}

/// A separate store for assertions.
async fn asker(scene: &Scene) -> RedisStore {
    RedisStore::builder(scene.server.url())
        .timeout(Duration::from_secs(10))
        .connect()
        .await
        .unwrap()
}

/// Returns the charged units of this caller's limit.
async fn counted(redis: &RedisStore, caller: usize) -> u64 {
    CALLERS[caller].1.limit() - u64::from(redis.check(peek(caller)).await.unwrap().remaining())
}

/// Asserts that each grant is charged exactly once: at the end, Redis counts its own grants and
/// those of the instances. Only checks without a reply from Redis are uncertain.
///
/// If Redis has lost its data, the checks and blocks in flight at that moment are uncertain too.
/// Units that were charged ahead are spent later, or refunded from charges made since. All units of
/// blocks may have been charged whose refund, or whose request, got no reply.
async fn reconciled(forgotten: &[u64], scene: &Scene, load: &Load, leased: bool) {
    let redis = asker(scene).await;
    // Other callers request more than they are granted.
    for (i, (name, _)) in CALLERS
        .iter()
        .enumerate()
        .filter(|(_, (_, kind))| *kind == Kind::Ample)
    {
        let used = async || counted(&redis, i).await;
        let by_us = load.sums.local[i].load(SeqCst);
        let largest = load
            .instances
            .iter()
            .map(|i| i.events.largest.load(SeqCst))
            .max()
            .unwrap_or(0);
        let of_blocks = load.total(|events| &events.left);
        let by_redis = load.sums.redis[i].load(SeqCst);
        let gone = match forgotten[i] {
            0 => 0,
            forgotten => {
                let block = if leased { largest } else { 0 };
                forgotten + load.instances.len() as u64 * (TASKS as u64 + block)
            }
        };
        let failed = load.total(|events| &events.failed);
        let unsure = || gone + failed + load.total(|events| &events.dropped);
        // The last charges are in flight for a moment after the recovery.
        until(
            &format!("{by_us} of {name} are reconciled, except {}", unsure()),
            async || used().await + unsure() >= by_redis + by_us,
        )
        .await;
        let used = used().await;
        assert!(
            used + gone >= by_redis,
            "{name}: of {by_redis} that Redis granted it has lost more than {gone}: {used}"
        );
        // A check that was charged without a reply was granted by the instance, once.
        let most = by_redis + by_us + of_blocks + failed * largest;
        assert!(
            used <= most,
            "{name}: {used} were charged of {most} at most, {by_redis} of them granted by Redis"
        );
    }
}

/// Redis does not reply, and the store's timeout is a minute: only the deadline can end the wait.
#[allow(dead_code, reason = "not a row of the table")]
pub async fn deadline(mode: Mode) {
    let server = block_in_place(RedisServer::start);
    let proxy = Proxy::start(server.port(), Mode::Pass);
    let mut load = Load::new(
        &proxy.url(),
        Setup {
            timeout: Duration::from_secs(60),
            ..Setup::default()
        },
    );
    load.introduce().await;
    load.start();
    until("Redis decides", async || {
        load.instances
            .iter()
            .all(|instance| instance.by_redis() > 500)
    })
    .await;
    proxy.set(mode);
    until("every instance is degraded", async || {
        load.instances.iter().all(|i| i.store.is_degraded())
    })
    .await;
    load.stop().await;
    let worst = Duration::from_micros(load.sums.worst.load(SeqCst));
    assert_eq!(load.sums.errors.load(SeqCst), 0);
    assert!(
        (DEADLINE..=DEADLINE + SLACK).contains(&worst),
        "a request waited for {worst:?}"
    );
}

/// Sends one store through many outages of every kind: no task, connection, key or memory is
/// leaked. Requires a separate process, since memory is measured per process.
#[allow(dead_code, reason = "not a row of the table")]
pub async fn cycles(count: usize) {
    /// Cycles until every buffer and pool has reached its final size.
    const WARM_UP: usize = 10;
    /// In KiB.
    const NOISE: i64 = 3 * 1024;
    /// The connections of the store's pool when it is full.
    const POOL: usize = 2;
    /// The pool's connections, and the test's.
    const CONNECTIONS: usize = POOL + 1;
    /// Tasks: of the test's connection, of the proxy per connection, of the proxy's listener, and
    /// of the store: one that waits for the end of the runtime, and one per worker. The store's
    /// connections have none.
    const ALIVE: usize = 1 + POOL + 2 + POOL;
    let server = block_in_place(RedisServer::start);
    let proxy = Proxy::start(server.port(), Mode::Pass);
    let admin = server.connection().await;
    let local = LocalStore::default();
    let store = Fallback::builder(
        RedisStore::connect_lazy(proxy.url()).unwrap(),
        local.clone(),
    )
    .deadline(DEADLINE)
    .unwrap()
    .build();
    let metrics = tokio::runtime::Handle::current().metrics();
    let ask = async || {
        let checks = (0..CALLERS.len()).map(|caller| store.check(crate::load::take(caller, false)));
        futures_util::future::join_all(checks)
            .await
            .into_iter()
            .all(|d| d.unwrap().source() != Source::Local)
    };
    // The number of connections after an outage is random, and each has tasks: compare only with a
    // full pool.
    let ample = CALLERS
        .iter()
        .position(|(_, kind)| *kind == Kind::Ample)
        .unwrap();
    let at_rest = async || {
        // Two full batches: with one, the second worker would be idle, and the pool would have one
        // connection.
        futures_util::future::join_all((0..256).map(|_| store.check(peek(ample)))).await;
        let listed = redis::cmd("CLIENT")
            .arg("LIST")
            .query_async::<String>(&mut admin.clone())
            .await;
        listed.is_ok_and(|list| list.lines().count() == CONNECTIONS)
            && metrics.num_alive_tasks() == ALIVE
    };
    until("Redis decides", ask).await;
    let mut memory = 0;
    let modes = [
        Mode::Refuse,
        Mode::Silent,
        Mode::Half,
        Mode::BlackHole,
        Mode::Swallow,
    ];
    for cycle in 0..count {
        if cycle == WARM_UP {
            until("the pool is full, and nothing else is left", at_rest).await;
            memory = resident();
        }
        proxy.set(modes[cycle % modes.len()]);
        until("it is open", async || {
            ask().await;
            store.is_degraded()
        })
        .await;
        proxy.set(Mode::Pass);
        until("it has recovered", async || {
            !store.is_degraded() && ask().await
        })
        .await;
    }
    until(
        "the pool is full, and no task and no connection is left",
        at_rest,
    )
    .await;
    assert!(local.len() <= CALLERS.len(), "{} keys", local.len());
    let gained = resident() - memory;
    println!("{gained} KiB more than after {WARM_UP} outages");
    assert!(
        gained < NOISE,
        "{gained} KiB more than after {WARM_UP} outages"
    );
}

/// In KiB.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: i64 = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("a number of pages");
    pages * 4
}
