//! Windows of a calendar in outages, on an instance whose clock is wrong.

use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};

use super::*;
use crate::gate::Global;
use crate::limit::Source;
use crate::middleware::RateLimitLayer;
use crate::util::Seed;

const HOUR: Duration = Duration::from_secs(3_600);

/// Makes something whose clocks start at this time.
fn at<T>(wall: Duration, make: impl FnOnce() -> T) -> T {
    let _seed = Seed::set(0, wall);
    make()
}

/// Returns the `t` of a response to a request that costs nothing.
async fn rest_in_headers(store: &Tested, policies: &Policies) -> u64 {
    let layer = RateLimitLayer::new(store.clone(), Global, policies.clone()).cost(|_| 0);
    let service = layer.layer(service_fn(async |_: Request<String>| {
        Ok::<_, std::io::Error>(Response::new(String::new()))
    }));
    let response = service.oneshot(Request::new(String::new())).await.unwrap();
    let field = response.headers()["ratelimit"].to_str().unwrap();
    let (_, rest) = field.rsplit_once(";t=").unwrap();
    rest.parse().unwrap()
}

/// An outage within a day of Redis's clock, and one over its midnight: each grant is charged once, in the day in which it was
/// made.
#[tokio::test(start_paused = true)]
async fn grants_are_charged_in_the_window_of_redis() {
    let plan = || Policy::new("plan", "fixed-window(day)".parse().unwrap(), "100/d").unwrap();
    let log = || Policy::new("log", Strategy::SlidingLog, "1000/30d").unwrap();
    let lists = [plan().into(), Policies::new([log(), plan()]).unwrap()];
    let evening = (24 * 20_000 + 21) * HOUR;
    for (own, policies) in [
        (evening - 2 * HOUR, &lists[0]),
        (evening - 2 * HOUR, &lists[1]),
        (evening, &lists[0]),
        (evening + 2 * HOUR, &lists[0]),
        (evening + 2 * HOUR, &lists[1]),
    ] {
        let primary = at(evening, Primary::default);
        let reconciled = Reconciled::default();
        let build = || {
            Fallback::builder(primary.clone(), LocalStore::default())
                .observer(reconciled.clone())
                .build()
        };
        let store: Tested = at(own, build);
        let take = async |cost, left, rest: Duration| {
            let taken = store.check(Check::take(ann(), policies, cost)).await;
            let taken = taken.unwrap();
            assert_eq!((taken.is_allowed(), taken.remaining()), (true, left));
            let reset = taken.each().last().unwrap().reset_after();
            let late = rest.saturating_sub(reset);
            assert!(reset <= rest && late < HOUR / 60, "{reset:?}");
            taken.source()
        };
        assert_eq!(take(1, 99, 3 * HOUR).await, Source::Redis);

        open(&store, &primary).await;
        assert_eq!(take(10, 89, 3 * HOUR).await, Source::Local);
        let unused = rest_in_headers(&store, policies).await;
        assert!((3 * 3_600 - 60..=3 * 3_600).contains(&unused), "{unused}");
        advance(2 * HOUR).await;
        close(&store, &primary).await;
        assert_eq!(primary.used(policies).await, 11, "at 23:00");

        open(&store, &primary).await;
        assert_eq!(take(7, 82, HOUR).await, Source::Local);
        advance(2 * HOUR).await;
        assert_eq!(take(3, 97, 23 * HOUR).await, Source::Local);
        close(&store, &primary).await;
        assert_eq!(primary.used(policies).await, 3, "at 01:00");
        let in_log = take(1, 96, 23 * HOUR).await;
        assert_eq!(in_log, Source::Redis);
        let dropped: u64 = reconciled.events().iter().map(|(_, dropped)| dropped).sum();
        assert_eq!(dropped, 0);
    }
}

/// An outage over the borders of days, weeks and months, on four instances whose clocks are wrong by hours: each grants its
/// share in each window of Redis's clock, and the grants of the last one are charged.
#[tokio::test(start_paused = true)]
async fn each_window_of_an_outage_has_its_share() {
    // 2024-12-31, a Tuesday, at 21:00.
    let evening = (24 * 20_088 + 21) * HOUR;
    for (calendar, quota, days) in [
        ("day", "100/d", 1),
        ("week", "100/week", 7),
        ("month", "100/month", 31),
    ] {
        for hours_ahead in [-5, 0, 9] {
            let plan = Policy::new(
                "plan",
                format!("fixed-window({calendar})").parse().unwrap(),
                quota,
            );
            let policies = Policies::from(plan.unwrap());
            let primary = at(evening, Primary::default);
            let mut instances = vec![];
            for number in 0..4 {
                let own = evening
                    .as_secs()
                    .checked_add_signed(number * hours_ahead * 3_600)
                    .unwrap();
                let build = || {
                    Fallback::builder(primary.clone(), LocalStore::default())
                        .share(4)
                        .build()
                };
                let store: Tested = at(Duration::from_secs(own), build);
                assert_eq!(burst(&store, &policies, 5).await, 5);
                instances.push(store);
            }
            for store in &instances {
                let seen = store.check(Check::peek(ann(), &policies, 1)).await.unwrap();
                assert_eq!((seen.remaining(), seen.source()), (80, Source::Redis));
            }
            for store in &instances {
                open(store, &primary).await;
            }
            let grants = async |most: usize| {
                let mut granted = vec![];
                for store in &instances {
                    granted.push(burst(store, &policies, most).await);
                }
                granted
            };
            assert_eq!(
                grants(30).await,
                [20; 4],
                "{calendar}, {hours_ahead}: a share of the rest"
            );
            let rest = instances[0]
                .check(Check::peek(ann(), &policies, 1))
                .await
                .unwrap();
            let to_border = rest.reset_after();
            advance(to_border - HOUR).await;
            assert_eq!(
                grants(30).await,
                [0; 4],
                "{calendar}, {hours_ahead}: before the border"
            );
            advance(2 * HOUR).await;
            assert_eq!(
                grants(30).await,
                [25; 4],
                "{calendar}, {hours_ahead}: after the border"
            );
            advance(days * 24 * HOUR).await;
            assert_eq!(
                grants(7).await,
                [7; 4],
                "{calendar}, {hours_ahead}: in the third window"
            );
            for store in &instances {
                close(store, &primary).await;
            }
            assert_eq!(
                primary.used(&policies).await,
                28,
                "{calendar}, {hours_ahead}"
            );
        }
    }
}
