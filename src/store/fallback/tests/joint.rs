//! Checks of several keys over a primary store that decides one key at a time.

use super::*;
use crate::limit::{JointCheck, Source};

/// The first key is charged, and the check of the second one is certainly not sent. The fallback decides both, and after the
/// outage each has counted the request once.
#[tokio::test(start_paused = true)]
async fn a_key_without_a_check_undoes_the_others() {
    let lists = ["user", "org"].map(|name| {
        let policy = Policy::new(name, Strategy::SlidingLog, "10/100d");
        Policies::from(policy.unwrap())
    });
    let (store, primary, reconciled) = pair(1);
    let keys = [ann(), Key::new("acme")];
    let joint = JointCheck::take(keys.into_iter().zip(&lists), 2);
    primary.set(Manner::Answers(1, unsent));
    let decided = store.check_all(joint.unwrap()).await.unwrap();
    assert!(decided.decision().is_allowed());
    assert_eq!(decided.decision().source(), Source::Local);
    primary.set(Manner::AtOnce);
    sleep(Duration::from_secs(5)).await;
    for (key, list) in keys.into_iter().zip(&lists) {
        let peek = Check::peek(key, list, 0);
        let counted = primary.counts.check(peek).await.unwrap();
        assert_eq!(counted.used(), 2);
    }
    assert_eq!(reconciled.events(), [(4, 0)]);
}
