//! Makes the layers of a module parallel, by a plan.

use std::collections::BTreeMap;

use super::backend::ParallelBackend;
use super::error::{Error, Result};
use super::layer::{Layer, Parallelize, walk};
use super::styles::ParallelStyle;
use super::world::Mesh;

/// Makes a module's layers parallel over a mesh of one dimension: torch's `parallelize_module`.
///
/// A key of the plan is a layer's path, matched token by token as in fnmatch (`*`, `?`, `[ab]`,
/// `[!ab]`); the empty key is the module itself. All ranks of the mesh must have the same plan and
/// layers. The module is consumed, so that none is left half parallel.
///
/// # Errors
/// [`Error::UnmatchedKey`], [`Error::Unsupported`], [`Error::AlreadyParallel`], [`Error::Invalid`]
/// unless the mesh has one dimension; [`crate::collectives::Error::Disagreement`] if another
/// rank has another plan.
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
    // By path, in the plan's order.
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

/// Whether a path matches a key, token by token.
fn matches(key: &str, path: &str) -> bool {
    let (keys, tokens) = (key.split('.').collect::<Vec<_>>(), path.split('.').collect::<Vec<_>>());
    keys.len() == tokens.len()
        && keys.iter().zip(tokens).all(|(key, token)| {
            let [key, token] = [key, token].map(|text| text.chars().collect::<Vec<_>>());
            fnmatch(&key, &token)
        })
}

/// Python's fnmatch, with case.
fn fnmatch(pattern: &[char], text: &[char]) -> bool {
    let Some((first, rest)) = pattern.split_first() else { return text.is_empty() };
    match first {
        '*' => (0..=text.len()).any(|skipped| fnmatch(rest, &text[skipped..])),
        '?' => !text.is_empty() && fnmatch(rest, &text[1..]),
        '[' => match class(rest) {
            Some((set, rest)) => {
                text.split_first().is_some_and(|(c, text)| set(*c) && fnmatch(rest, text))
            }
            // Never closed: the character itself.
            None => text.first() == Some(&'[') && fnmatch(rest, &text[1..]),
        },
        c => text.first() == Some(c) && fnmatch(rest, &text[1..]),
    }
}

/// Parses a character class after its `[`: the class, and the rest of the pattern after `]`.
fn class(pattern: &[char]) -> Option<(impl Fn(char) -> bool, &[char])> {
    let negated = pattern.first() == Some(&'!');
    let body = &pattern[usize::from(negated)..];
    // A bracket that comes first is one of the characters.
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
