use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

use super::{Field, Setting, Written};

/// Several settings: a list, or one text with commas in between, so that an environment variable can hold it.
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<T: Setting> Serialize for List<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(Written))
    }
}

impl<'de, T: Setting> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListVisitor(PhantomData))
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Setting> Visitor<'de> for ListVisitor<T> {
    type Value = List<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list, each {}", T::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<List<T>, E> {
        // `split` finds one text in none.
        if text.trim().is_empty() {
            return Ok(List(vec![]));
        }
        text.split(',').map(|text| T::read(text.trim()).map_err(E::custom)).collect::<Result<_, _>>().map(List)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<List<T>, A::Error> {
        let mut settings = vec![];
        while let Some(setting) = list.next_element_seed(Field::new(""))? {
            settings.push(setting);
        }
        Ok(List(settings))
    }
}
