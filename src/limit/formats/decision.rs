//! Decisions as data, for logs and admin pages.

use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::limit::{Decision, Outcome};

/// As its [name](Outcome::as_str), such as `denied`. The waits are fields of the [`Decision`].
impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// As a table of `outcome`, `policy` (the name of the deciding one), `source`, `granted`, `remaining`, `capacity`, and the
/// times `retry_after` and `reset_after` in seconds. `retry_after` is null if waiting does not help, or is not needed. The
/// caller is no part of a decision.
impl Serialize for Decision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let retry_after = self.retry_after().map(|time| time.as_secs_f64());
        let mut table = serializer.serialize_struct("Decision", 8)?;
        table.serialize_field("outcome", &self.outcome())?;
        table.serialize_field("policy", self.policy().name())?;
        table.serialize_field("source", self.source().as_str())?;
        table.serialize_field("granted", &self.granted())?;
        table.serialize_field("remaining", &self.remaining())?;
        table.serialize_field("capacity", &self.capacity())?;
        table.serialize_field("retry_after", &retry_after)?;
        table.serialize_field("reset_after", &self.reset_after().as_secs_f64())?;
        table.end()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use crate::limit::{Check, Key, Policy, Source, Strategy, Verdict};

    #[test]
    fn a_decision_is_a_table() {
        let policies = Policy::new("api", Strategy::Gcra, "10/m").unwrap().into();
        let check = Check::take(Key::GLOBAL, &policies, 4);
        let verdict = Verdict::denied(Duration::from_millis(1_500)).with_remaining(3);
        let decision = check.decided(Source::Redis, 0, |_| verdict);
        let table = json!({
            "outcome": "denied",
            "policy": "api",
            "source": "redis",
            "granted": 0,
            "remaining": 3,
            "capacity": 10,
            "retry_after": 1.5,
            "reset_after": 1.5,
        });
        assert_eq!(serde_json::to_value(&decision).unwrap(), table);
    }
}
