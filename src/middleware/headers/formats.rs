//! Feature `serde`: header fields as a list of their names.

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::{Headers, Trio};
use crate::limit::ConfigError;
use crate::limit::formats::{List, Setting};

/// One name in the list.
#[derive(Clone, Copy)]
enum Form {
    Draft,
    Trio(Trio),
}

impl Setting for Form {
    const EXPECTED: &'static str = "`draft`, `github`, `x-seconds` or `draft-6`";

    fn read(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            "draft" => Ok(Self::Draft),
            "github" => Ok(Self::Trio(Trio::GitHub)),
            "x-seconds" => Ok(Self::Trio(Trio::XSeconds)),
            "draft-6" => Ok(Self::Trio(Trio::Draft6)),
            _ => Err(ConfigError::choice("form of header fields", text, Self::EXPECTED)),
        }
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            Self::Draft => "draft",
            Self::Trio(Trio::GitHub) => "github",
            Self::Trio(Trio::XSeconds) => "x-seconds",
            Self::Trio(Trio::Draft6) => "draft-6",
        })
    }
}

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let List(forms) = List::deserialize(deserializer)?;
        let mut headers = Self::NONE;
        for form in forms {
            match form {
                Form::Draft => headers.draft = true,
                Form::Trio(trio) if headers.trio.is_none_or(|there| there == trio) => headers.trio = Some(trio),
                Form::Trio(_) => {
                    return Err(D::Error::custom(
                        "two of `github`, `x-seconds` and `draft-6` are there: a response has one trio, so leave one out",
                    ));
                }
            }
        }
        Ok(headers)
    }
}

impl Serialize for Headers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let draft = self.draft.then_some(Form::Draft);
        List(draft.into_iter().chain(self.trio.map(Form::Trio)).collect()).serialize(serializer)
    }
}
