//! What an observer is told, and what becomes of it in metrics and logs.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tower_redis_ratelimit::{Observer, RedisStore, event};

use crate::support::{layer, layer_with, limited, request, send};

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Observer for Notes {
    fn decided(&self, event: &event::Decided<'_>) {
        assert!(event.took < Duration::from_secs(60));
        self.0.lock().unwrap().push(format!("{:?} {}", event.decision.source(), event.decision.is_allowed()));
    }

    fn failed(&self, event: &event::Failed<'_>) {
        self.0.lock().unwrap().push(format!("{:?}", event.error.kind()));
    }
}

#[tokio::test]
async fn a_layer_tells_every_decision_and_failure() {
    let notes = Notes::default();
    let service = limited(layer("1/h").observer((notes.clone(), ())));
    send(&service, request("alice")).await;
    send(&service, request("alice")).await;
    let nobody_listens = RedisStore::connect_lazy("redis://127.0.0.1:1/").unwrap();
    send(&limited(layer_with(nobody_listens, "1/h").observer(notes.clone())), request("alice")).await;
    assert_eq!(*notes.0.lock().unwrap(), ["Local true", "Local false", "Unreachable"]);
}

#[cfg(feature = "metrics")]
#[tokio::test]
async fn metrics_count_by_policy_outcome_and_source() {
    use std::collections::BTreeMap;

    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    use tower_redis_ratelimit::{Fallback, LocalStore, MetricsObserver};

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let _guard = metrics::set_default_local_recorder(&recorder);

    let redis = RedisStore::builder("redis://127.0.0.1:1/").observer(MetricsObserver).connect_lazy().unwrap();
    let store = Fallback::new(redis, LocalStore::default()).observer(MetricsObserver);
    let service = limited(layer_with(store, "3/h").observer(MetricsObserver));
    for _ in 0..5 {
        send(&service, request("alice")).await;
    }
    let metrics: BTreeMap<String, DebugValue> = snapshotter
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| {
            let labels: Vec<&str> = key.key().labels().map(|label| label.value()).collect();
            (format!("{} {}", key.key().name(), labels.join(" ")).trim().to_owned(), value)
        })
        .collect();
    let counter = |name: &str| match &metrics[name] {
        DebugValue::Counter(count) => *count,
        other => panic!("{name} is {other:?}"),
    };
    assert_eq!(counter("ratelimit_decisions_total api allowed local"), 3);
    assert_eq!(counter("ratelimit_decisions_total api denied local"), 2);
    assert_eq!(counter("ratelimit_failures_total unreachable"), 3);
    assert_eq!(metrics["ratelimit_degraded"], DebugValue::Gauge(1.0.into()));
    assert!(matches!(&metrics["ratelimit_check_seconds"], DebugValue::Histogram(times) if times.len() == 5));
    assert!(metrics.contains_key("ratelimit_batch_checks") && metrics.contains_key("ratelimit_queue_checks"));
}

#[cfg(feature = "tracing")]
#[tokio::test]
async fn tracing_warns_of_an_outage_and_names_no_caller() {
    use std::io;

    use tower_redis_ratelimit::{Error, ErrorKind, TracingObserver};

    /// Collects what is logged.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let observer = TracingObserver;
    observer.degraded(&event::Degraded::new(&Error::new(ErrorKind::Timeout)));
    observer.recovered(&event::Recovered::new(Duration::from_secs(3)));
    observer.settled(&event::Settled::new(7, 1));
    send(&limited(layer("1/h").observer(TracingObserver)), request("alice")).await;

    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    for part in ["WARN", "rate limits are local", "did not answer in time", "after=3s", "charged=7 dropped=1"] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
    assert!(text.contains("policy=\"api\" allowed=true remaining=0 source=Local"), "{text}");
    assert!(!text.contains("alice"), "{text}");
}
