//! The public names of the library, as a list that a change of the API has to change: `xtask/api.txt`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::Result;
use crate::command::root;

const LIST: &str = "xtask/api.txt";

/// Where `cargo doc` has put the documentation of the library.
const DOCS: &str = "target/doc/tower_redis_ratelimit";

/// What an item's page calls its parts, and what the list calls them.
const PARTS: [(&str, &str); 6] = [
    ("associatedconstant.", "const"),
    ("associatedtype.", "type"),
    ("method.", "fn"),
    ("structfield.", "field"),
    ("tymethod.", "required fn"),
    ("variant.", "variant"),
];

/// Writes the list.
pub(crate) fn save() -> Result {
    fs::write(root().join(LIST), list()?).map_err(|error| format!("{LIST}: {error}"))
}

/// Fails if the list is not what it would be now.
pub(crate) fn check() -> Result {
    let saved =
        fs::read_to_string(root().join(LIST)).map_err(|error| format!("{LIST}: {error}"))?;
    let list = list()?;
    let differs = |one: &str, other: &str| {
        one.lines()
            .find(|line| !other.lines().any(|other| other == *line))
            .map(str::to_owned)
    };
    match differs(&list, &saved).or_else(|| differs(&saved, &list)) {
        None => Ok(()),
        Some(line) => Err(format!(
            "the public API has changed, first at `{}`: if that is meant, run `cargo xtask api` and commit {LIST}",
            line.trim()
        )),
    }
}

/// One line for each public item and each of its parts, by the pages that rustdoc has written of them.
fn list() -> Result<String> {
    let mut items = BTreeMap::new();
    find(&root().join(DOCS), "", &mut items)?;
    Ok(items
        .into_iter()
        .map(|(item, parts)| {
            parts.iter().fold(item.clone() + "\n", |list, part| {
                list + &item + " " + part + "\n"
            })
        })
        .collect())
}

fn find(folder: &Path, module: &str, items: &mut BTreeMap<String, Vec<String>>) -> Result {
    let problem = |error| format!("{}: {error}", folder.display());
    for entry in fs::read_dir(folder).map_err(problem)? {
        let path = entry.map_err(problem)?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_dir() {
            find(&path, &format!("{module}{name}::"), items)?;
        } else if let [kind, name, "html"] = name.split('.').collect::<Vec<_>>()[..] {
            let page = fs::read_to_string(&path).map_err(problem)?;
            items.insert(format!("{module}{name} ({kind})"), parts(&page));
        }
    }
    Ok(())
}

/// The parts that are the item's own: not those that any implementation of a trait has.
fn parts(page: &str) -> Vec<String> {
    let own =
        ["trait-implementations", "implementors"].map(|end| page.find(&format!("id=\"{end}\"")));
    let own = &page[..own.into_iter().flatten().min().unwrap_or(page.len())];
    let ids = own
        .split(" id=\"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next());
    let part = |id: &str| {
        PARTS
            .iter()
            .find_map(|(kind, name)| Some(format!("{name} {}", id.strip_prefix(kind)?)))
    };
    // The fields of a variant are `variant.A.field.b`.
    let mut parts: Vec<String> = ids
        .filter_map(part)
        .filter(|part| !part.contains('.'))
        .collect();
    parts.sort();
    parts.dedup();
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_those_of_the_item_itself() {
        let page = r#"<section id="variant.A"><h2 id="implementations"><section id="method.new"><h2 id="trait-implementations">
            <section id="method.fmt">"#;
        assert_eq!(parts(page), ["fn new", "variant A"]);
    }
}
