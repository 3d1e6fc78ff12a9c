//! Feature `serde`: header fields as a list of their names.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::{Headers, LegacyStyle};
use crate::error::ConfigError;
use crate::limit::formats::{Setting, SettingList, deserialize, text};

const DRAFT_11: &str = "draft-11";

/// One name in the list: a legacy style, or `None` for the fields of the draft.
struct StyleName(Option<LegacyStyle>);

text!(StyleName, "`draft-11`, `github`, `x-seconds` or `draft-6`");
deserialize!(SettingList<StyleName>);

impl FromStr for StyleName {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            DRAFT_11 => Ok(Self(None)),
            style => match style.parse() {
                Ok(style) => Ok(Self(Some(style))),
                Err(_) => Err(ConfigError::choice(
                    "form of header fields",
                    text,
                    Self::EXPECTED,
                )),
            },
        }
    }
}

impl fmt::Display for StyleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str(DRAFT_11),
            Some(style) => style.fmt(f),
        }
    }
}

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let SettingList(forms) = SettingList::deserialize(deserializer)?;
        let mut headers = Self::NONE;
        for StyleName(form) in forms {
            match (form, headers.legacy) {
                (None, _) => headers.draft = true,
                (Some(style), Some(other)) if style != other => {
                    return Err(D::Error::custom(format_args!(
                        "`{other}` and `{style}` exclude each other: use one of them"
                    )));
                }
                (legacy, _) => headers.legacy = legacy,
            }
        }
        Ok(headers)
    }
}

impl Serialize for Headers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let draft = self.draft.then_some(StyleName(None));
        let legacy = self.legacy.map(|style| StyleName(Some(style)));
        serializer.collect_seq(draft.into_iter().chain(legacy))
    }
}
