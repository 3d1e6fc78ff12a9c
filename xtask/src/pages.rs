//! Checks the pages of the documentation, which must be correct on a code host, on the registry and
//! on docs.rs.

use std::fs;
use std::path::Path;

use crate::Result;
use crate::command::root;

const PAGES: [&str; 30] = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/README.md",
    "docs/answers.md",
    "docs/choosing.md",
    "docs/comparison.md",
    "docs/faults.md",
    "docs/keys.md",
    "docs/leases.md",
    "docs/migrating.md",
    "docs/options.md",
    "docs/performance.md",
    "docs/pitfalls.md",
    "docs/recipes.md",
    "docs/runbook.md",
    "docs/running.md",
    "docs/servers.md",
    "docs/settling.md",
    "docs/sizing.md",
    "docs/start.md",
    "docs/upgrades.md",
    "docs/waiting.md",
    "benches/RESULTS.md",
    "examples/dashboard/README.md",
    "examples/envoy/README.md",
    "inspect/README.md",
    "peers/README.md",
    "tests/migrating/README.md",
];

/// Maximum width of a line of code, which the columns of docs.rs and of code hosts hold.
const WIDTH: usize = 95;

/// The URL of the published documentation, and the folder of the output of `cargo doc`.
const DOCS: (&str, &str) = (
    "https://docs.rs/tower-redis-ratelimit/latest/",
    "target/doc/",
);

/// Checks that every link has a target, that no line of code is hidden, which only rustdoc supports,
/// and that none is too wide for its column.
pub(crate) fn check() -> Result {
    for page in PAGES {
        let text =
            fs::read_to_string(root().join(page)).map_err(|error| format!("{page}: {error}"))?;
        if let Some((number, problem)) = problems(page, &text).first() {
            return Err(format!("{page}:{number}: {problem}"));
        }
        if let Some(module) = page.strip_prefix("docs/") {
            check_module(module.trim_end_matches(".md").trim_end_matches("README"))?;
        }
    }
    Ok(())
}

/// Fails if a module of the guide, as rendered by rustdoc, links to a file: rustdoc has modules
/// only.
fn check_module(name: &str) -> Result {
    let path = root()
        .join(DOCS.1)
        .join("tower_redis_ratelimit/guide")
        .join(name)
        .join("index.html");
    let html = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    match file_link(&html) {
        Some(link) => Err(format!(
            "the guide's {name:?} links to {link}: write `[text][name]`, and the name in src/guide.rs"
        )),
        None => Ok(()),
    }
}

fn file_link(html: &str) -> Option<&str> {
    let links = html
        .split("href=\"")
        .skip(1)
        .filter_map(|rest| rest.split(['"', '#']).next());
    links
        .filter(|link| !link.contains("://"))
        .find(|link| link.ends_with(".md"))
}

/// Returns the problems of a page, each with its line number.
fn problems(page: &str, text: &str) -> Vec<(usize, String)> {
    let mut problems = vec![];
    // The language of the code block that contains the line.
    let mut code = None;
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            code = code.is_none().then_some(language);
        } else if let Some(language) = code {
            if line.chars().count() > WIDTH {
                problems.push((
                    number,
                    format!("code of more than {WIDTH} columns scrolls sideways"),
                ));
            }
            // Rustdoc treats a block without a language as Rust.
            let rust = language.is_empty() || language.starts_with("rust");
            if rust && (line.trim() == "#" || line.trim_start().starts_with("# ")) {
                problems.push((number, "this line is hidden by rustdoc only".to_owned()));
            }
        } else {
            let problem = |link: &str| match link.strip_prefix('#') {
                Some(anchor) => (!has_heading(text, anchor))
                    .then(|| format!("#{anchor} is not a heading of this page")),
                None => problem(page, link),
            };
            problems.extend(links(line).filter_map(|link| Some((number, problem(link)?))));
        }
    }
    problems
}

/// Returns the targets of `[text](target)` and `[label]: target`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let inline = line
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    let definition = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("]: "))
        .map(|(_, target)| target);
    inline.chain(definition)
}

/// Returns `true` if a heading of the page has this anchor, on a code host and in rustdoc.
fn has_heading(text: &str, anchor: &str) -> bool {
    let name = |heading: &str| -> String {
        let heading = heading.to_lowercase().replace(' ', "-");
        heading
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_'))
            .collect()
    };
    text.lines()
        .filter_map(|line| {
            line.strip_prefix('#')?
                .trim_start_matches('#')
                .strip_prefix(' ')
        })
        .any(|heading| name(heading) == anchor)
}

fn problem(page: &str, link: &str) -> Option<String> {
    let (public, built) = DOCS;
    let (file, anchor) = link
        .split_once('#')
        .map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let path = match file.strip_prefix(public) {
        Some(path) => Path::new(built).join(path),
        None if link.starts_with("https://") => return None,
        // A relative link to a picture works: the registry resolves it in the repository, and docs.rs
        // by a definition in `src/lib.rs`.
        None if page == "README.md" && !file.ends_with(".svg") => {
            return Some(format!(
                "{link} is a dead link in the registry and on docs.rs: use an absolute URL"
            ));
        }
        None => Path::new(page).parent()?.join(file),
    };
    let target = root().join(&path);
    if !target.exists() {
        return Some(format!(
            "{link} leads to {}, which does not exist",
            path.display()
        ));
    }
    let anchor = anchor?;
    let text = fs::read_to_string(target).unwrap_or_default();
    let found = text.contains(&format!("id=\"{anchor}\"")) || has_heading(&text, anchor);
    (!found).then(|| {
        format!(
            "{link} leads to a place that {} does not have",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn lines(page: &str, text: &str) -> Vec<usize> {
        problems(page, text)
            .into_iter()
            .map(|(number, _)| number)
            .collect()
    }

    #[test]
    fn links_must_lead_to_something() {
        let text =
            "[a](choosing.md) and ![b](none.svg)\n\n[c]: strategies/gcra.svg\n[d]: none.md\n";
        assert_eq!(lines("docs/faults.md", text), [1, 4]);
        let fine =
            "```text\n[a](none.md)\n```\n<https://docs.rs/> [a](https://docs.rs/) [b](faults.md)\n";
        assert!(lines("docs/faults.md", fine).is_empty());
        assert_eq!(lines("README.md", "[a](docs/choosing.md)\n"), [1]);
        assert_eq!(
            lines("README.md", "[a]: docs/outage.svg\n[b]: none.svg\n"),
            [2]
        );
        let within = "## A server, by TLS\n\n[a](#a-server-by-tls)\n[b](#a-server)\n some text\n[c](#some-text)\n";
        assert_eq!(lines("README.md", within), [4, 6]);
        let elsewhere = "[a]: sizing.md#memory\n[b]: sizing.md#none\n[c]: none.md#memory\n";
        assert_eq!(lines("docs/faults.md", elsewhere), [2, 3]);
    }

    #[test]
    fn the_readme_states_the_versions() {
        let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
        let (readme, manifest) = (read("README.md"), read("Cargo.toml"));
        let version = |name: &str| {
            let line = manifest
                .lines()
                .find(|line| line.starts_with(name))
                .unwrap();
            let version = line.split('"').nth(1).unwrap();
            // The first number that is not 0 decides on compatibility; of Rust, the second counts too.
            match version.split_once('.') {
                Some(("1", _)) if !name.starts_with("rust") => "1".to_owned(),
                _ => version.to_owned(),
            }
        };
        let stated = format!(
            "For axum {}, tonic {}, http {} and Rust {} or later.",
            version("axum = {"),
            version("tonic = {"),
            version("http = \""),
            version("rust-version = ")
        );
        assert!(readme.contains(&stated), "the README lacks: {stated}");
    }

    #[test]
    fn modules_link_to_modules() {
        let html = r#"<a href="../keys/index.html">a</a> <a href="https://a.b/c.md">b</a> <a href="keys.md#users">c</a>"#;
        assert_eq!(file_link(html), Some("keys.md"));
        assert_eq!(file_link(&html.replace("keys.md", "keys")), None);
    }

    /// Adds a path and its contents, recursively.
    fn add(paths: &mut Vec<PathBuf>, path: PathBuf) {
        if path.is_dir() {
            fs::read_dir(&path)
                .unwrap()
                .for_each(|entry| add(paths, entry.unwrap().path()));
        }
        paths.push(path);
    }

    #[test]
    fn searched_words_find_items() {
        let mut paths = vec![];
        add(&mut paths, root().join("src"));
        let files = paths.iter().filter(|path| path.is_file());
        let aliases: String = files
            .map(|path| fs::read_to_string(path).unwrap())
            .flat_map(|text| {
                let lines = text.lines().filter(|line| line.contains("#[doc(alias"));
                lines.map(str::to_owned).collect::<Vec<_>>()
            })
            .collect();
        for word in [
            "429",
            "Retry-After",
            "X-Forwarded-For",
            "WebSocket",
            "concurrency",
            "semaphore",
            "throttle",
            "plan",
            "allowlist",
            "idempotency",
        ] {
            assert!(aliases.contains(&format!("\"{word}\"")), "{word}");
        }
    }

    /// Texts that look like paths.
    const OTHERS: [&str; 2] = ["docs.rs", "requests/s"];

    /// Checks pages and the comments of Lua files. The beginning of a path may be omitted, as in
    /// `gate/select.rs`.
    #[test]
    fn paths_named_in_texts_exist() {
        let mut paths = vec![];
        for path in [
            "CONTRIBUTING.md",
            "README.md",
            "SECURITY.md",
            "benches",
            "docs",
            "examples",
            "lua",
            "peers/README.md",
            "peers/rocksdb",
            "peers/src",
            "src",
            "tests",
            "xtask",
        ] {
            add(&mut paths, root().join(path));
        }
        let is = |path: &Path, kinds: &[&str]| {
            kinds
                .iter()
                .any(|kind| path.extension().is_some_and(|it| it == *kind))
        };
        let is_folder = |name: &str| {
            !name.is_empty()
                && paths
                    .iter()
                    .any(|path| path.is_dir() && path.ends_with(name))
        };
        let mut lost = vec![];
        for page in paths.iter().filter(|path| is(path, &["md", "lua"])) {
            let text = fs::read_to_string(page).unwrap();
            let lines = text
                .lines()
                .filter(|line| is(page, &["md"]) || line.starts_with("--"));
            let words = lines.flat_map(|line| {
                line.split(|c: char| c.is_whitespace() || "`()[],;:|\"".contains(c))
            });
            let words = words.filter_map(|word| word.split('#').next());
            for word in words.map(|word| word.trim_end_matches(['.', '/'])) {
                let is_code = is(Path::new(word), &["rs", "lua"]);
                let is_path = is_code
                    || word
                        .split_once('/')
                        .is_some_and(|(folder, _)| is_folder(folder));
                // A placeholder, such as `lua/<strategy>.lua`.
                if is_path
                    && !word.contains('<')
                    && !OTHERS.contains(&word)
                    && !paths.iter().any(|path| path.ends_with(word))
                {
                    lost.push(format!("{} names {word}", page.display()));
                }
            }
        }
        assert!(lost.is_empty(), "{lost:#?}");
    }

    #[test]
    fn code_fits_into_the_column() {
        let text = |columns: usize| format!("{}\n```text\n{0}\n```\n", "é".repeat(columns));
        assert!(lines("docs/faults.md", &text(WIDTH)).is_empty());
        assert_eq!(lines("docs/faults.md", &text(WIDTH + 1)), [3]);
    }

    #[test]
    fn code_hides_no_line() {
        let text = "# A title\n```rust\n# fn main() {\n#[test]\n#\n# }\n```\n# Another\n```sh\n# a comment\n```\n";
        assert_eq!(lines("README.md", text), [3, 5, 6]);
    }
}
