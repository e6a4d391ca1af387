//! Distributes the layers of a module according to a plan.

use std::collections::BTreeMap;

use super::backend::ParallelBackend;
use super::error::{Error, Result};
use super::layer::{Layer, Parallelize, walk};
use super::styles::ParallelStyle;
use super::world::Mesh;

/// Distributes the layers of a module over a mesh of one dimension: torch's `parallelize_module`.
///
/// A key of the plan is the path of a layer, and is matched token by token like `fnmatch` (`*`,
/// `?`, `[ab]`, `[!ab]`). The empty key is the module itself. All ranks of the mesh must have the
/// same plan and the same layers. The function consumes the module, so that an error does not leave
/// a module that is partly distributed.
///
/// # Errors
/// [`Error::UnmatchedKey`], [`Error::Unsupported`] and [`Error::AlreadyParallel`];
/// [`Error::Invalid`] unless the mesh has one dimension;
/// [`crate::collectives::Error::Disagreement`] if another rank has a different plan.
pub fn parallelize_module<B: ParallelBackend, M: Parallelize<B>>(
    mut module: M,
    mesh: &Mesh,
    plan: &[(&str, &dyn ParallelStyle<B>)],
) -> Result<M> {
    mesh.check_1d("a plan")?;
    let mut layers = Vec::new();
    walk("", Layer::Module(&mut module), &mut |path, layer| {
        layers.push(format!("{path}: {}", layer.kind()));
        Ok(())
    })?;
    let paths: Vec<&str> =
        layers.iter().filter_map(|layer| Some(layer.split_once(':')?.0)).collect();
    // The indices of the styles for each path, in the order of the plan.
    let mut matched: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, (key, _)) in plan.iter().enumerate() {
        let found: Vec<&str> = paths.iter().filter(|path| matches(key, path)).copied().collect();
        if found.is_empty() {
            let layers = paths.iter().map(|path| (*path).to_owned()).collect();
            return Err(Error::UnmatchedKey { key: (*key).to_owned(), layers });
        }
        for path in found {
            matched.entry(path).or_default().push(index);
        }
    }
    mesh.world().agree(mesh.process_mesh(), "the plan", &format!("{plan:?} for {layers:?}"))?;
    walk("", Layer::Module(&mut module), &mut |path, layer| {
        let styles = matched.get(path).into_iter().flatten();
        styles.map(|&index| plan[index].1).try_for_each(|style| style.apply(path, layer, mesh))
    })?;
    Ok(module)
}

/// Returns whether a path matches a key, token by token.
fn matches(key: &str, path: &str) -> bool {
    let (keys, tokens) = (key.split('.').collect::<Vec<_>>(), path.split('.').collect::<Vec<_>>());
    keys.len() == tokens.len()
        && keys.iter().zip(tokens).all(|(key, token)| {
            let [key, token] = [key, token].map(|text| text.chars().collect::<Vec<_>>());
            fnmatch(&key, &token)
        })
}

/// Python's `fnmatch`, case-sensitive.
fn fnmatch(pattern: &[char], text: &[char]) -> bool {
    let Some((first, rest)) = pattern.split_first() else { return text.is_empty() };
    match first {
        '*' => (0..=text.len()).any(|skipped| fnmatch(rest, &text[skipped..])),
        '?' => !text.is_empty() && fnmatch(rest, &text[1..]),
        '[' => match class(rest) {
            Some((set, rest)) => {
                text.split_first().is_some_and(|(c, text)| set(*c) && fnmatch(rest, text))
            }
            // A bracket that is not closed matches itself.
            None => text.first() == Some(&'[') && fnmatch(rest, &text[1..]),
        },
        c => text.first() == Some(c) && fnmatch(rest, &text[1..]),
    }
}

/// Parses a character class after its `[`. Returns the class and the rest of the pattern after `]`.
fn class(pattern: &[char]) -> Option<(impl Fn(char) -> bool, &[char])> {
    let negated = pattern.first() == Some(&'!');
    let body = &pattern[usize::from(negated)..];
    // A closing bracket at the first position is a member of the class.
    let end = 1 + body.iter().skip(1).position(|&c| c == ']')?;
    let set = body[..end].to_vec();
    let contains = move |c: char| {
        let mut at = 0;
        while at < set.len() {
            if at + 2 < set.len() && set[at + 1] == '-' {
                if (set[at]..=set[at + 2]).contains(&c) {
                    return true;
                }
                at += 3;
            } else if set[at] == c {
                return true;
            } else {
                at += 1;
            }
        }
        false
    };
    Some((move |c| contains(c) != negated, &body[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_token_by_token() {
        for (key, path) in [
            ("", ""),
            ("fc1", "fc1"),
            ("fc?", "fc1"),
            ("*", "fc1"),
            ("*.fc[12]", "mlp.fc2"),
            ("*.fc[!1]", "mlp.fc2"),
            ("blocks.*.mlp", "blocks.11.mlp"),
            ("blocks.[0-3].mlp", "blocks.2.mlp"),
            ("[]]", "]"),
            ("[a", "[a"),
        ] {
            assert!(matches(key, path), "{key:?} and {path:?}");
        }
        for (key, path) in [
            ("*", "mlp.fc1"),
            ("fc1", "mlp.fc1"),
            ("mlp", "mlp.fc1"),
            ("fc?", "fc"),
            ("FC1", "fc1"),
            ("fc[!1]", "fc1"),
            ("blocks.[0-3].mlp", "blocks.4.mlp"),
            ("", "fc1"),
        ] {
            assert!(!matches(key, path), "{key:?} and {path:?}");
        }
    }
}
