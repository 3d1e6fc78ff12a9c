//! The caller that an argument means.

use serde::Deserialize;
use serde::de::value::{Error as Invalid, StrDeserializer};
use tower_redis_ratelimit::Key;
use tower_redis_ratelimit::extract::HeaderKey;

/// Suffix of the key under which a dry run counts a caller.
const DRY_RUN_SUFFIX: &str = ",~try";

/// Suffix of the key under which the denials of a caller are counted that may block the caller.
const STRIKES_SUFFIX: &str = ",~hit";

/// A caller as an operator writes it.
#[derive(Clone)]
pub(crate) struct CallerArg {
    /// The operator's text.
    pub(crate) text: String,
    pub(crate) id: CallerId,
}

#[derive(Clone)]
pub(crate) enum CallerId {
    Key(Key),
    /// The two possible keys of a header's value: its hash, and the readable value.
    Header([Key; 2]),
    /// The digits in the log.
    Log(String),
}

impl CallerArg {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let digits = text
            .strip_prefix("Key(")
            .and_then(|rest| rest.strip_suffix(')'));
        let id = if let Some(digits) = digits.unwrap_or(text).strip_prefix('#') {
            if digits.len() != 6 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(format!(
                    "{text:?} is no caller: the log has six digits, such as #684888"
                ));
            }
            CallerId::Log(format!("#{}", digits.to_ascii_lowercase()))
        } else if let Some((name, value)) = text.split_once(": ") {
            let header = HeaderKey::new(name).map_err(|error| error.to_string())?;
            CallerId::Header([header.key_of(value), header.readable().key_of(value)])
        } else {
            let key = Key::deserialize(StrDeserializer::new(text));
            CallerId::Key(key.map_err(|error: Invalid| error.to_string())?)
        };
        let text = text.to_owned();
        Ok(Self { text, id })
    }

    /// Returns `true` if a key in Redis is this caller's own, or its key of a dry run.
    pub(crate) fn matches(&self, key: &Key) -> bool {
        let (caller, _) = split_dry_run(key);
        match &self.id {
            CallerId::Key(own) => own == key || *own == caller,
            CallerId::Header(keys) => keys.contains(&caller),
            CallerId::Log(digits) => log_digits(&caller) == *digits || log_digits(key) == *digits,
        }
    }

    /// The reason if nothing is counted.
    pub(crate) fn nothing_counted(&self) -> String {
        let text = &self.text;
        match &self.id {
            CallerId::Key(key)
                if key.reveal() == text.as_str() && !text.contains([':', ',', '*', '~']) =>
            {
                format!(
                    "nothing is counted of `{text}`: if it comes from a header, write `secret:{text}`\n"
                )
            }
            CallerId::Log(_) => format!(
                "nothing is counted of `{text}`: its counts have expired, or the service uses another server or prefix\n"
            ),
            _ => format!("nothing is counted of `{text}`\n"),
        }
    }
}

/// The caller of a key in Redis, and whether it is a key of a dry run.
pub(crate) fn split_dry_run(key: &Key) -> (Key, bool) {
    let caller = key
        .reveal()
        .strip_suffix(DRY_RUN_SUFFIX)
        .and_then(|caller| {
            let caller: Result<Key, Invalid> = Key::deserialize(StrDeserializer::new(caller));
            caller.ok()
        });
    caller.map_or((*key, false), |caller| (caller, true))
}

/// The caller whose strikes are counted under a key in Redis. `None` for another key.
pub(crate) fn caller_of_strikes(key: &Key) -> Option<&str> {
    key.reveal().strip_suffix(STRIKES_SUFFIX)
}

/// The digits that the log shows for a caller.
pub(crate) fn log_digits(key: &Key) -> String {
    let text = format!("{key:?}");
    text.trim_start_matches("Key(")
        .trim_end_matches(')')
        .to_owned()
}
