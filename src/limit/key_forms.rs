use std::fmt;

use super::Key;

/// A set of forms of keys: the possible forms of the keys of an extractor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyForms(u8);

impl KeyForms {
    /// An extractor that runs the application's code may make any key.
    pub const ANY: Self = Self(u8::MAX);
    pub const ADDRESS: Self = Self(1);
    /// Secrets, and texts that are not kept in clear.
    pub const HASH: Self = Self(1 << 1);
    pub const CLEAR: Self = Self(1 << 2);
    pub const TUPLE: Self = Self(1 << 3);
    pub const GLOBAL: Self = Self(1 << 4);
    pub const NO_ROUTE: Self = Self(1 << 5);

    /// Each form, with its name in a message.
    const NAMES: [(Self, &str); 6] = [
        (Self::ADDRESS, "addresses (`ip:192.0.2.7`)"),
        (Self::HASH, "hashes, as of secrets (`~8c3b..`)"),
        (Self::CLEAR, "texts in clear (`user-42`)"),
        (Self::TUPLE, "tuples (`user-42,ip:192.0.2.7`)"),
        (Self::GLOBAL, "the key of all callers (`*`)"),
        (Self::NO_ROUTE, "the key without a route (`route:none`)"),
    ];

    /// Returns the form of a key.
    pub(crate) fn of(key: &Key) -> Self {
        match key.as_bytes() {
            bytes if bytes.contains(&b',') => Self::TUPLE,
            b"*" => Self::GLOBAL,
            b"route:none" => Self::NO_ROUTE,
            [b'~', ..] => Self::HASH,
            [b'i', b'p', b':', ..] => Self::ADDRESS,
            _ => Self::CLEAR,
        }
    }

    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns `true` if all forms of `other` are in this set.
    pub(crate) const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The names.
impl fmt::Display for KeyForms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Self::NAMES.iter().filter(|(form, _)| self.has(*form));
        for (i, (_, name)) in names.enumerate() {
            f.write_str(if i == 0 { "" } else { " or " })?;
            f.write_str(name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_one_form() {
        let (address, secret) = (Key::ip([192, 0, 2, 7].into()), Key::secret("sk-1"));
        let forms = [
            (address, KeyForms::ADDRESS),
            (Key::UNIX, KeyForms::ADDRESS),
            (secret, KeyForms::HASH),
            (Key::new("ip:192.0.2.7"), KeyForms::HASH),
            (Key::new("ann"), KeyForms::CLEAR),
            (Key::GLOBAL, KeyForms::GLOBAL),
            (Key::tuple(&[Key::new("ann"), address]), KeyForms::TUPLE),
            // Too long to be kept in clear.
            (Key::tuple(&[secret, address]), KeyForms::HASH),
        ];
        for (key, form) in forms {
            assert_eq!(KeyForms::of(&key), form, "{}", key.reveal());
        }
        let both = KeyForms::CLEAR.and(KeyForms::HASH);
        assert!(both.has(KeyForms::HASH) && !both.has(KeyForms::ADDRESS));
        assert_eq!(
            both.to_string(),
            "hashes, as of secrets (`~8c3b..`) or texts in clear (`user-42`)"
        );
    }
}
