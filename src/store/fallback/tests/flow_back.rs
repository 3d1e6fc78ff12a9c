//! Charges that expire during an outage free capacity once, as in one bucket, window or log that all instances share.

use fastrand::Rng;

use super::*;
use crate::limit::{Align, Quota};
use crate::simulation::pick;
use crate::util::{Seed, instant};

const BURST: u32 = 840;
/// The units that a bucket refills at the end of an interval.
const BATCH: u32 = 84;
/// The time in which a full bucket drains.
const FULL: Duration = Duration::from_millis(8_400);
const SEEDS: u64 = 400;

/// The steps of an outage at which an instance gets checks for its whole capacity.
const DEMAND: [fn(u32) -> bool; 5] = [
    |_| false,
    |_| true,
    |step| step == 0,
    |step| step == 12,
    |step| step % 5 == 0,
];
const STEPS: u32 = 24;

/// An outage of some instances, and a shared count that decides the same checks.
struct Outage {
    policies: Policies,
    stores: Vec<Tested>,
    primary: Primary,
    reconciled: Reconciled,
    shared: LocalStore,
    /// The next id, if the checks have ids.
    id: Option<u32>,
    granted: u32,
    /// Granted units that the shared count would have denied.
    excess: u32,
}

impl Outage {
    fn new(rng: &mut Rng) -> Self {
        let strategy = *pick(rng, Strategy::ALL);
        let quota = match strategy.frees().has_burst() {
            true => Quota::per(BATCH, FULL / (BURST / BATCH)).burst(BURST),
            false => Quota::per(BURST, FULL),
        };
        let (instances, primary, reconciled) =
            (rng.u32(1..=8), Primary::default(), Reconciled::default());
        let store = |_| {
            let store = Fallback::builder(primary.clone(), LocalStore::default());
            store.share(instances).observer(reconciled.clone()).build()
        };
        let stores = (0..instances).map(store).collect();
        let policies = Policy::new("test", strategy, quota).unwrap().into();
        let id = rng.bool().then_some(0);
        Self {
            policies,
            stores,
            primary,
            reconciled,
            shared: LocalStore::default(),
            id,
            granted: 0,
            excess: 0,
        }
    }

    /// Checks an instance for up to `most`, and takes the granted cost from the shared count.
    async fn take(&mut self, instance: usize, most: u32) {
        let up_to = |cost| Check::up_to(ann(), &self.policies, cost);
        let check = match &mut self.id {
            Some(id) => {
                *id += 1;
                up_to(most).with_id(id.to_string())
            }
            None => up_to(most),
        };
        let granted = self.stores[instance].check(check).await.unwrap().granted();
        let shared = self.shared.check(up_to(granted)).await.unwrap().granted();
        (self.granted, self.excess) = (self.granted + granted, self.excess + granted - shared);
    }

    async fn begin(&mut self) {
        for store in &self.stores {
            // Lets the fallback learn the caller's count.
            let _ = store
                .check(Check::peek(ann(), &self.policies, 0))
                .await
                .unwrap();
        }
        for store in &self.stores {
            open(store, &self.primary).await;
            self.primary.set(Manner::AtOnce);
        }
        self.primary.set(Manner::Each(unreachable));
    }

    async fn end(&mut self) {
        for store in &self.stores {
            close(store, &self.primary).await;
        }
    }
}

/// The instances grant no more than one shared count, unless several instances have granted something after the counts
/// from before the outage have expired. After the outage the primary store counts no more than a shared count would.
#[tokio::test(start_paused = true)]
async fn flow_back_is_granted_once() {
    for seed in 0..SEEDS {
        let mut rng = Rng::with_seed(seed);
        // All clocks are equal.
        let _seed = Seed::set(
            seed,
            Duration::from_secs(1_700_000_000) + FULL.mul_f64(rng.f64()),
        );
        let mut outage = Outage::new(&mut rng);
        let instances = outage.stores.len();
        let some = rng.u32(1..BURST);
        let before = *pick(&mut rng, &[0, some, BURST / 2, BURST]);
        let lasts = FULL * *pick(&mut rng, &[1, 2, 4, 6, 12]) / 4;
        let demand: Vec<_> = (0..instances).map(|_| *pick(&mut rng, &DEMAND)).collect();
        let policy = outage.policies.as_slice()[0].clone();
        let run = format!(
            "seed {seed}, {policy:?}: {instances} instances, {before} used before {lasts:?}, ids {:?}",
            outage.id
        );

        let since = instant();
        outage.take(0, before).await;
        outage.begin().await;
        outage.granted = 0;
        let mut granted = vec![0; instances];
        for step in 0..STEPS {
            for (instance, granted) in granted.iter_mut().enumerate() {
                let so_far = outage.granted;
                if demand[instance](step) {
                    outage.take(instance, BURST).await;
                }
                *granted += outage.granted - so_far;
            }
            sleep(lasts / STEPS).await;
        }
        assert_eq!(outage.excess, 0, "granted by all parts together: {run}");
        outage.end().await;
        let flown = flown(since.elapsed());

        let charged: u64 = outage
            .reconciled
            .events()
            .iter()
            .map(|(charged, _)| charged)
            .sum();
        assert!(
            charged <= outage.granted.into(),
            "{charged} charged of {}: {run}",
            outage.granted
        );
        let peek = outage
            .shared
            .check(Check::peek(ann(), &outage.policies, 0))
            .await
            .unwrap();
        let (counted, shared) = (
            outage.primary.used(&outage.policies).await,
            peek.capacity() - peek.remaining(),
        );
        // Each instance rounds up, and a check with an id is charged in full.
        if policy.frees().is_gradual() && outage.id.is_none() || outage.granted == 0 {
            assert!(
                counted <= shared + instances as u32,
                "{counted} counted of {shared}: {run}"
            );
        }

        // All instances are checked for their whole capacity.
        for step in 0..2 * STEPS {
            outage.take(step as usize % instances, BURST).await;
            sleep(FULL / STEPS).await;
        }
        let others = granted
            .iter()
            .filter(|granted| **granted > 0)
            .count()
            .saturating_sub(1) as u32;
        let twice = (others * flown.saturating_sub(before)).min(BURST);
        let bound = match policy.strategy() {
            _ if policy.frees().is_gradual() => twice,
            // Shares are refilled at other times than the whole.
            Some(Strategy::TokenBucket(_)) => twice + 2 * BATCH,
            // Their windows begin at other times too.
            Some(Strategy::FixedWindow(Align::FirstHit)) => BURST,
            _ => 0,
        };
        assert!(
            outage.excess <= bound,
            "{} of {bound} above one count: {run}",
            outage.excess
        );
    }
}

/// The units that drain in `time`.
fn flown(time: Duration) -> u32 {
    (time.as_micros() * u128::from(BURST)).div_ceil(FULL.as_micros()) as u32
}
