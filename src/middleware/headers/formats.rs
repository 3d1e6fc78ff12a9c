//! Feature `serde`: header fields as a list of their names.

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::{Headers, LegacyHeaders};
use crate::limit::formats::{List, deserialize};
use crate::limit::words;

/// One name in the list.
enum Form {
    Draft11,
    GitHub,
    XSeconds,
    Draft6,
}

words!(Form, "form of header fields", "`draft-11`, `github`, `x-seconds` or `draft-6`":
    Draft11 = "draft-11", GitHub = "github", XSeconds = "x-seconds", Draft6 = "draft-6");

deserialize!(List<Form>);

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let List(forms) = List::deserialize(deserializer)?;
        let mut headers = Self::NONE;
        for form in forms {
            let legacy = match form {
                Form::Draft11 => {
                    headers.draft = true;
                    continue;
                }
                Form::GitHub => LegacyHeaders::GitHub,
                Form::XSeconds => LegacyHeaders::XSeconds,
                Form::Draft6 => LegacyHeaders::Draft6,
            };
            if headers.legacy.is_some_and(|there| there != legacy) {
                return Err(D::Error::custom(
                    "`github`, `x-seconds` and `draft-6` exclude each other: use one of them",
                ));
            }
            headers.legacy = Some(legacy);
        }
        Ok(headers)
    }
}

impl Serialize for Headers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let legacy = self.legacy.map(|legacy| match legacy {
            LegacyHeaders::GitHub => Form::GitHub,
            LegacyHeaders::XSeconds => Form::XSeconds,
            LegacyHeaders::Draft6 => Form::Draft6,
        });
        serializer.collect_seq(
            self.draft
                .then_some(Form::Draft11)
                .into_iter()
                .chain(legacy),
        )
    }
}
