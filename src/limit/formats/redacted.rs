//! Tables whose errors show no secret.

use std::any::type_name;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde::forward_to_deserialize_any;

use crate::error::redacted;

/// The private type of serde that deserializes a flattened table.
const FLATTENED: &str = "FlatMapDeserializer";

/// Reads a table, or one of its names. serde's errors quote unknown names, and a text where a table is
/// expected. Both may be misplaced secrets, such as a URL or a caller.
pub(crate) struct Redacted<T>(pub(crate) T);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Redacted<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(Redacted(visitor))
    }

    /// Selects the names of the struct from a flattened table. Any other deserializer chooses the type itself: the
    /// error for another type is then the visitor's, while the error of a format that expects a struct may quote a
    /// text. A flattened table can only be recognized by its type.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        if type_name::<D>().contains(FLATTENED) {
            return self.0.deserialize_struct(name, fields, Redacted(visitor));
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_identifier(Redacted(visitor))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Redacted<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V::Value, E> {
        self.0.visit_str(&redacted(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(Redacted(table))
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Redacted<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        self.0.next_key_seed(Redacted(seed))
    }

    fn next_value_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<K::Value, A::Error> {
        self.0.next_value_seed(seed)
    }
}

impl<'de, K: DeserializeSeed<'de>> DeserializeSeed<'de> for Redacted<K> {
    type Value = K::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<K::Value, D::Error> {
        self.0.deserialize(Redacted(deserializer))
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    /// A struct that records the type of its deserializer.
    struct ReadBy(&'static str);

    impl<'de> Deserialize<'de> for ReadBy {
        fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Ok(Self(type_name::<D>()))
        }
    }

    #[derive(Deserialize)]
    struct Settings {
        #[serde(flatten)]
        flattened: ReadBy,
    }

    /// `Redacted` recognizes a flattened table by the name of a private type of serde. If this test fails, serde has renamed
    /// the type: use the new name in `deserialize_struct`. Until then, a flattened table of settings is rejected.
    #[test]
    fn serde_reads_flattened_tables_by_this_type() {
        let settings: Settings = serde_json::from_str("{}").unwrap();
        let name = settings.flattened.0;
        assert!(name.contains(FLATTENED), "serde has renamed it: {name}");
    }
}
