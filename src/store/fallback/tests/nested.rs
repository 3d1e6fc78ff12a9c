//! A fallback whose primary store is a fallback: two servers, and then this instance.

use super::*;
use crate::limit::Source;
use crate::store::Health;

type Inner = Fallback<Primary, Primary>;

/// Collects the texts of failed checks.
#[derive(Clone, Default)]
struct Texts(Arc<Mutex<Vec<String>>>);

impl Observer for Texts {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { error, .. } = *event {
            lock(&self.0).push(error.to_string());
        }
    }
}

/// Returns the two servers, and the store over them.
fn nested() -> (Primary, Primary, Fallback<Inner, LocalStore>, Texts) {
    let (near, far, texts) = (named("near"), named("far"), Texts::default());
    let inner = Fallback::builder(near.clone(), far.clone()).observer(Texts::default());
    let store = Fallback::builder(inner.build(), LocalStore::default()).observer(texts.clone());
    (near, far, store.build(), texts)
}

fn named(name: &'static str) -> Primary {
    Primary {
        name: Some(name),
        ..Primary::default()
    }
}

fn take(name: &str) -> Check {
    Check::take(Key::new(name), &policies(Strategy::Gcra, "100/h"), 1)
}

/// The second server decides after the deadline of the first, and has time for that.
#[tokio::test(start_paused = true)]
async fn the_second_server_has_time_to_decide() {
    let (near, far, store, texts) = nested();
    near.set(Manner::Silent);
    far.set(Manner::After(Duration::from_millis(60)));
    for _ in 0..8 {
        let decision = store.check(take("ann")).await.unwrap();
        assert_eq!(decision.source(), Source::Redis);
    }
    assert_eq!(far.asked(), 8);
    assert_eq!(lock(&texts.0).len(), 0, "{:?}", lock(&texts.0));
    assert!(!store.is_degraded());
    assert_eq!(
        store.backend().health(),
        Health::Local,
        "the first server is down"
    );
}

/// A missed deadline is that of the server that was to decide.
#[tokio::test(start_paused = true)]
async fn an_error_names_the_server_that_is_late() {
    let (near, far, store, texts) = nested();
    near.set(Manner::Each(unreachable));
    for _ in 0..5 {
        let decision = store.check(take("ann")).await.unwrap();
        assert_eq!(decision.source(), Source::Redis);
    }
    far.set(Manner::Silent);
    let decision = store.check(take("ann")).await.unwrap();
    assert_eq!(decision.source(), Source::Local);
    let texts = lock(&texts.0).clone();
    assert_eq!(texts.len(), 1);
    assert!(
        texts[0].contains("the server far did not reply"),
        "{texts:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_outer_deadline_is_the_longer_one() {
    let inner = Fallback::builder(LocalStore::default(), LocalStore::default());
    let inner = inner.deadline(Duration::from_millis(150)).unwrap().build();
    let outer = |millis| {
        let builder = Fallback::builder(inner.clone(), LocalStore::default());
        builder.deadline(Duration::from_millis(millis))
    };
    for millis in [151, 5_000] {
        assert!(outer(millis).is_ok());
    }
    assert_eq!(
        outer(150).unwrap_err().to_string(),
        "a deadline of 150ms over a `Fallback` with a deadline of 150ms, whose own fallback would never decide in time: use a \
         longer one, such as 300ms"
    );
}
