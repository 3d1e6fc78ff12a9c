//! Feature `serde`: where the address of the client is read, as a table.

use std::fmt;
use std::num::NonZeroU8;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};

use super::trust::{Trust, Trusted};
use super::{ClientIp, Forwarding};
use crate::limit::ConfigError;
use crate::limit::formats::{Field, List, Setting};

const PEER: &str = "peer";
const CHOICES: &str =
    "`peer`, or a header and who writes it, such as `{ header = \"x-forwarded-for\", trust = [\"private\"] }`";

#[derive(serde::Deserialize)]
#[serde(rename = "ClientIp", deny_unknown_fields)]
struct Table {
    #[serde(default)]
    header: Option<String>,
    #[serde(default)]
    trust: Option<List<Trusted>>,
    #[serde(default, deserialize_with = "hops")]
    hops: Option<NonZeroU8>,
    #[serde(default, deserialize_with = "ipv6_prefix")]
    ipv6_prefix: Option<Bits>,
}

fn hops<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NonZeroU8>, D::Error> {
    Field::new("hops").deserialize(deserializer).map(Some)
}

fn ipv6_prefix<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bits>, D::Error> {
    Field::new("ipv6_prefix").deserialize(deserializer).map(Some)
}

impl Table {
    fn client_ip<E: Error>(self) -> Result<ClientIp, E> {
        let client_ip = match (self.header, self.trust, self.hops) {
            (None, None, None) => Ok(ClientIp::peer()),
            (Some(header), Some(List(trusted)), None) => ClientIp::header(&header).trusting(Ok(trusted)),
            (Some(header), None, Some(hops)) => ClientIp::header(&header).hops(hops.get()),
            (Some(header), None, None) => {
                return Err(E::custom(format_args!(
                    "nobody is trusted to write {header:?}: say who does, by `trust = [\"private\"]` or by `hops = 1`"
                )));
            }
            (Some(_), Some(_), Some(_)) => {
                return Err(E::custom("`trust` and `hops` are both there: leave one out"));
            }
            (None, ..) => {
                return Err(E::custom(
                    "there is no header that the trusted proxies write: add it, such as `header = \"x-forwarded-for\"`",
                ));
            }
        };
        let client_ip = client_ip.map_err(E::custom)?;
        match self.ipv6_prefix {
            Some(Bits(bits)) => client_ip.ipv6_prefix(bits).map_err(E::custom),
            None => Ok(client_ip),
        }
    }
}

impl<'de> Deserialize<'de> for ClientIp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PeerOrTable)
    }
}

struct PeerOrTable;

impl<'de> Visitor<'de> for PeerOrTable {
    type Value = ClientIp;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(CHOICES)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ClientIp, E> {
        match text.trim() {
            PEER => Ok(ClientIp::peer()),
            _ => Err(E::custom(ConfigError::choice("client address", text, CHOICES))),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ClientIp, A::Error> {
        Table::deserialize(MapAccessDeserializer::new(map))?.client_ip()
    }
}

#[derive(serde::Serialize)]
#[serde(rename = "ClientIp")]
struct Written<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    header: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trust: Option<List<Trusted>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hops: Option<NonZeroU8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ipv6_prefix: Option<u8>,
}

impl Serialize for ClientIp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if *self == Self::peer() {
            return serializer.serialize_str(PEER);
        }
        let Self { forwarding, ipv6_prefix } = self;
        let ipv6_prefix = Some(*ipv6_prefix).filter(|bits| *bits != Self::peer().ipv6_prefix);
        let mut written = Written { header: None, trust: None, hops: None, ipv6_prefix };
        if let Some(Forwarding { header, trust, .. }) = forwarding {
            written.header = Some(header.as_str());
            match trust {
                Trust::Networks(trusted) => written.trust = Some(List(trusted.clone())),
                Trust::Hops(hops) => written.hops = Some(*hops),
            }
        }
        written.serialize(serializer)
    }
}

impl Setting for Trusted {
    const EXPECTED: &'static str = "a network such as `203.0.113.0/24`, an address, `private`, `loopback` or `unix`";

    fn read(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The length of an IPv6 prefix.
struct Bits(u8);

impl Setting for Bits {
    const EXPECTED: &'static str = "a whole number from 1 to 128, such as `64`";
    const NUMBER: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        match text.trim().parse() {
            Ok(bits @ 1..=128) => Ok(Self(bits)),
            _ => Err(ConfigError::choice("IPv6 prefix", text, Self::EXPECTED)),
        }
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}
