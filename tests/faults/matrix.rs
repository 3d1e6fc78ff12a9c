//! The rows: what goes wrong, how it is put right, and what must hold for each of them.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use tokio::task::block_in_place;
use tokio::time::sleep;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore, redis};

use crate::load::{CALLERS, DEADLINE, Kind, Load, Pings, Setup, TASKS, peek};
use crate::proxy::{Mode, Proxy};
use crate::support::{RedisServer, cmd, free_port, until};
use crate::table::{FAULT, Outcome, SLACK};

/// The promise is a second, and the table shows what it takes; this is for a busy machine.
const RECOVERY: Duration = Duration::from_secs(10);
/// What a stall may add to it: a probe that fails, the longest wait for the next one, and the wait for the others.
const ATTEMPT: Duration = Duration::from_millis(1_500);

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// `kill -9`, and started again with nothing.
    KilledEmpty,
    /// `kill -9`, and started again with its data.
    Killed,
    /// SIGSTOP, and then SIGCONT.
    Frozen,
    /// All connections cut, again and again.
    Cut,
    /// The path to Redis.
    Path(Mode),
    /// `maxclients` reached.
    Full,
    /// `maxmemory` reached, and nothing may be evicted.
    OutOfMemory,
    /// Fewer replicas than it must have to take writes.
    NoReplicas,
    /// A read-only replica.
    Replica,
    /// Again and again.
    ScriptFlush,
    FlushAll,
    /// Another password, and all connections cut.
    Password,
    /// The user may not call scripts.
    Forbidden,
    /// The name does not resolve, ever.
    NoName,
    /// Nobody listens at the start.
    StartDown,
}

impl Fault {
    /// How long it lasts, at least.
    const fn lasts(self) -> Duration {
        match self {
            Self::Frozen => Duration::from_secs(5),
            // Several openings of each breaker.
            Self::Path(Mode::Waver(..)) => Duration::from_secs(5),
            _ => FAULT,
        }
    }

    fn setup(self) -> Setup {
        match self {
            // Alone, each late answer is of the whole limit; and of many connections they come one by one.
            Self::Path(Mode::Waver(..)) => Setup {
                instances: 1,
                connections: 16,
                ..Setup::default()
            },
            _ => Setup::default(),
        }
    }

    /// Whether Redis forgets everything.
    const fn forgets(self) -> bool {
        matches!(self, Self::KilledEmpty | Self::FlushAll)
    }

    /// Whether every instance must go on by itself. The others may.
    fn is_outage(self) -> bool {
        match self {
            Self::Cut | Self::ScriptFlush | Self::FlushAll => false,
            Self::Path(Mode::Delay(delay)) => delay > DEADLINE,
            Self::Path(Mode::Waver(..)) => false,
            _ => true,
        }
    }

    /// The failures of which some check must meet one, so that the row is about what its name says. Where connections are
    /// cut first, the breaker may be open before any other error is seen, and a connection that rests then has none.
    fn shows_as(self) -> &'static [ErrorKind] {
        match self {
            Self::KilledEmpty | Self::Killed | Self::Cut | Self::StartDown => {
                &[ErrorKind::Unreachable]
            }
            Self::Path(Mode::Half | Mode::Refuse) => &[ErrorKind::Unreachable],
            Self::Path(Mode::Answer(reply)) if reply.starts_with(b"-LOADING") => {
                &[ErrorKind::NotReady]
            }
            Self::Path(Mode::Answer(_)) => &[ErrorKind::Protocol],
            Self::Path(Mode::Delay(delay)) if delay < DEADLINE => &[],
            Self::Frozen | Self::Path(_) => &[ErrorKind::Timeout],
            Self::OutOfMemory => &[ErrorKind::OutOfMemory],
            Self::NoReplicas => &[ErrorKind::Refused],
            Self::Replica => &[ErrorKind::ReadOnly],
            Self::Forbidden => &[ErrorKind::Permission],
            Self::Full => &[ErrorKind::Unreachable],
            Self::Password => &[ErrorKind::Unreachable, ErrorKind::Authentication],
            Self::ScriptFlush | Self::FlushAll | Self::NoName => &[],
        }
    }

    /// Whether some instances may go on by themselves while Redis decides for others.
    fn is_partial(self) -> bool {
        !self.is_outage() && !self.is_unnoticed()
    }

    /// Whether Redis does all that it is sent, and only its answers are late.
    const fn only_delays(self) -> bool {
        matches!(self, Self::Path(Mode::Delay(_) | Mode::Waver(..)))
    }

    /// Whether Redis decides all the same, so that not even one check fails.
    const fn is_unnoticed(self) -> bool {
        matches!(self, Self::ScriptFlush | Self::FlushAll)
    }

    /// Whether the instances have never seen Redis when it begins.
    const fn starts_down(self) -> bool {
        matches!(self, Self::NoName | Self::StartDown)
    }

    /// Whether it lasts only while it is done.
    const fn is_repeated(self) -> bool {
        matches!(self, Self::Cut | Self::ScriptFlush)
    }
}

/// Hands all rows to another macro, which makes tests of them, or a table.
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
            cut_in_a_reply: "cut half-way through a reply" => Fault::Path(Mode::Half);
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
    /// Was there before the fault, and so is let in throughout it.
    admin: MultiplexedConnection,
}

impl Scene {
    async fn command(&mut self, command: &str) {
        let _: redis::Value = cmd(command)
            .query_async(&mut self.admin)
            .await
            .expect(command);
    }

    async fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::KilledEmpty | Fault::Killed => self.server.kill(),
            Fault::Frozen => self.server.freeze(),
            Fault::Cut => self.command("CLIENT KILL TYPE normal").await,
            Fault::Path(mode) => self.proxy.set(mode),
            Fault::Full => {
                self.command("CONFIG SET maxclients 1").await;
                self.command("CLIENT KILL TYPE normal").await;
            }
            Fault::OutOfMemory => self.command("CONFIG SET maxmemory 1").await,
            Fault::NoReplicas => self.command("CONFIG SET min-replicas-to-write 1").await,
            Fault::Replica => {
                self.command(&format!("REPLICAOF 127.0.0.1 {}", free_port()))
                    .await
            }
            Fault::ScriptFlush => self.command("SCRIPT FLUSH").await,
            Fault::FlushAll => self.command("FLUSHALL").await,
            Fault::Password => {
                self.command("CONFIG SET requirepass another").await;
                self.command("CLIENT KILL TYPE normal").await;
            }
            Fault::Forbidden => self.command("ACL SETUSER default -evalsha").await,
            Fault::NoName | Fault::StartDown => {}
        }
    }

    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::KilledEmpty | Fault::Killed => block_in_place(|| self.server.restart()),
            Fault::Frozen => self.server.thaw(),
            Fault::Path(_) | Fault::StartDown => self.proxy.set(Mode::Pass),
            Fault::Full => self.command("CONFIG SET maxclients 1000").await,
            Fault::OutOfMemory => self.command("CONFIG SET maxmemory 0").await,
            Fault::NoReplicas => self.command("CONFIG SET min-replicas-to-write 0").await,
            Fault::Replica => self.command("REPLICAOF NO ONE").await,
            Fault::Password => {
                // Not by `command`, which would drop the empty word.
                let mut cmd = redis::cmd("CONFIG");
                cmd.arg("SET").arg("requirepass").arg("");
                let _: redis::Value = cmd.query_async(&mut self.admin).await.unwrap();
            }
            Fault::Forbidden => self.command("ACL SETUSER default +evalsha").await,
            Fault::Cut | Fault::ScriptFlush | Fault::FlushAll | Fault::NoName => {}
        }
    }
}

/// Runs a row, and asserts what is promised of every one.
///
/// **How much may be granted.** A caller's limit, and once more what Redis had granted it before it forgot that. Beyond
/// it:
///
/// - A check that Redis was asked and did not answer is answered by the instance and never reconciled, since it may have
///   been charged. When a call fails, every task of the instance may have such a check under way; from then on there is
///   one at a time, until the third call in a row fails and the breaker opens. So each opening costs an instance at most
///   [`TASKS`] + 3 of them. The observer counts them.
/// - An instance goes on from what it has last heard to be left. It has not heard of what Redis has granted since: at
///   most one request under way for every task, [`TASKS`] for each instance, of which it takes its part.
/// - A charge of the reconciliation that fails is not sent again. The observer counts these too. Where Redis is only slow it
///   was made all the same.
/// - Where Redis fails some instances while it answers others, these have the whole of what is left, and each of those
///   has its part of it: all but one part, at worst.
///
/// Where callers are [leased](leased) to, what was charged ahead comes on top: of those who have used up their limits, nothing
/// is. The asks for blocks and the refunds of what is left fail too.
pub async fn run(fault: Fault) -> Outcome {
    run_as(fault, fault.setup()).await
}

/// The same of callers that are leased to.
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
    let admin = server.connection().await;
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
        // Those who are leased to ask Redis now and then.
        let some = if setup.leased { 50 } else { 500 };
        until("every instance knows who is spent", async || {
            instances.iter().all(|instance| {
                instance.by_redis() > some && instance.has_denied(Kind::Spent, Source::Redis)
            })
        })
        .await;
    }

    // On a machine that stalls, Redis may fail some instances before anybody is spent.
    let early = load.total(|events| &events.failed);
    let opened_early = load.total(|events| &events.degraded);
    let mut forgotten = vec![0; CALLERS.len()];
    if fault.forgets() {
        // With what is charged ahead.
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
        // A grant that is recorded only now was forgotten too.
        forgotten
            .iter_mut()
            .zip(&load.sums.redis)
            .for_each(|(count, sum)| *count = sum.load(SeqCst).max(*count));
    }
    load.tighten();
    if matches!(fault, Fault::Path(Mode::Waver(..))) {
        load.burst();
    }
    if fault.is_outage() {
        until("every instance goes on by itself", async || {
            instances.iter().all(|i| i.store.is_degraded())
        })
        .await;
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
    let by_redis: Vec<u64> = instances
        .iter()
        .map(|instance| instance.by_redis())
        .collect();
    let mut recovery = None;
    if fault != Fault::NoName {
        // Not all at the same moment: on a busy machine one may be away again.
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
        // Whatever Redis still has for anybody is asked for now.
        until("Redis has nothing left for the tight", async || {
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
    assert!(
        worst <= DEADLINE + SLACK + stalled,
        "a request waited for {worst:?}, and the machine for {stalled:?}"
    );
    // Of those who are leased to few checks fail, and maybe none in this way.
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
    // Checks that a stall of the machine may have made late: each that was under way. Redis may have stalled for longer.
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
            "Redis decides all the same, but {failed} checks failed, of {late} that may"
        );
    }

    if fault != Fault::NoName {
        reconciled(&forgotten, &scene, &load, setup.leased).await;
    }
    let (dropped, charged) = (
        load.total(|events| &events.dropped),
        load.total(|events| &events.charged),
    );
    // Once Redis has forgotten them, the spent are granted something again.
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
    if fault.is_partial() {
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
        // For each caller an ask, and what is left of up to four blocks.
        let of_blocks = if setup.leased {
            5 * CALLERS.len() as u64
        } else {
            0
        };
        let most = opened * (TASKS as u64 + 3 + of_blocks) + late;
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

/// A store of its own.
async fn asker(scene: &Scene) -> RedisStore {
    RedisStore::builder(scene.server.url())
        .timeout(Duration::from_secs(10))
        .connect()
        .await
        .unwrap()
}

/// How much of this caller's limit is charged.
async fn counted(redis: &RedisStore, caller: usize) -> u64 {
    CALLERS[caller].1.limit() - u64::from(redis.check(peek(caller)).await.unwrap().remaining())
}

/// No charge twice, and none lost: what Redis counts in the end is what it has granted, and what the instances have
/// granted meanwhile. Only of a check that it was asked and did not answer is it not known.
///
/// Of what Redis has forgotten, at most what was under way at that moment is not known either, checks and blocks. What was
/// charged ahead is spent after that, or refunded from what was charged then. Of blocks, all may have been charged that was to
/// be refunded, or was asked for and not answered.
async fn reconciled(forgotten: &[u64], scene: &Scene, load: &Load, leased: bool) {
    let redis = asker(scene).await;
    // Of the others, more is asked for than there is to charge.
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
        // The last charges are under way for a moment after the recovery.
        until(
            &format!("{by_us} of {name} are reconciled, but for {}", unsure()),
            async || used().await + unsure() >= by_redis + by_us,
        )
        .await;
        let used = used().await;
        assert!(
            used + gone >= by_redis,
            "{name}: of {by_redis} that Redis granted it has lost more than {gone}: {used}"
        );
        // A check that was charged and not answered was granted here, once.
        let most = by_redis + by_us + of_blocks + failed * largest;
        assert!(
            used <= most,
            "{name}: {used} were charged of {most} at most, {by_redis} of them granted by Redis"
        );
    }
}

/// Redis says nothing, and the store would wait for a minute: it is the deadline alone that answers.
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
    until("every instance goes on by itself", async || {
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

/// One store through many outages of every sort: no task, connection, key or memory is left behind. The process must be
/// its own, or the memory is somebody else's.
#[allow(dead_code, reason = "not a row of the table")]
pub async fn cycles(count: usize) {
    /// Until every buffer and pool has the size that it needs.
    const WARM_UP: usize = 10;
    /// In KiB.
    const NOISE: i64 = 3 * 1024;
    /// The connections of the store's pool when it is full.
    const POOL: usize = 2;
    /// Those, and ours.
    const CONNECTIONS: usize = POOL + 1;
    /// That of our connection, the proxy's for each that goes through it, the proxy's listener, and the store's, which
    /// waits for the end of the runtime. The store's connections have none.
    const ALIVE: usize = 1 + POOL + 2;
    let server = block_in_place(RedisServer::start);
    let proxy = Proxy::start(server.port(), Mode::Pass);
    let admin = server.connection().await;
    let local = LocalStore::default();
    let store = Fallback::new(
        RedisStore::connect_lazy(proxy.url()).unwrap(),
        local.clone(),
    )
    .deadline(DEADLINE);
    let metrics = tokio::runtime::Handle::current().metrics();
    let ask = async || {
        let checks = (0..CALLERS.len()).map(|caller| store.check(crate::load::take(caller, false)));
        futures_util::future::join_all(checks)
            .await
            .into_iter()
            .all(|d| d.unwrap().source() != Source::Local)
    };
    // How many connections an outage leaves to the pool is chance, and each has tasks: only a full pool can be counted.
    let ample = CALLERS
        .iter()
        .position(|(_, kind)| *kind == Kind::Ample)
        .unwrap();
    let at_rest = async || {
        // Two full batches, as one would leave the second worker without work, and the pool with one connection.
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
