package main

import (
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/mutants"
	"mailproof/scenarios"
	"mailproof/verify"
)

const repository = "../.."

// read returns a file of the repository.
func read(t *testing.T, name string) string {
	t.Helper()
	body, err := os.ReadFile(filepath.Join(repository, name))
	require.NoError(t, err)
	return string(body)
}

// pages are the Markdown files of the repository.
func pages(t *testing.T) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md")
	cmd.Dir = repository
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("not a git checkout: %v", err)
	}
	return slices.DeleteFunc(strings.Fields(string(out)), func(name string) bool { return strings.Contains(name, "testdata/") })
}

var (
	linkPattern    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	headingPattern = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	notInAnchor    = regexp.MustCompile(`[^\p{L}\p{N}\s_-]`)
	fencePattern   = regexp.MustCompile("(?ms)^```.*?^```")
)

// links of a page: paths from the repository's root, with the anchor.
func links(page, text string) (found []string) {
	for _, m := range linkPattern.FindAllStringSubmatch(fencePattern.ReplaceAllString(text, ""), -1) {
		to, anchor, _ := strings.Cut(m[1], "#")
		switch {
		case strings.Contains(to, ":"):
			continue // another site
		case to == "":
			to = page
		default:
			to = path.Join(path.Dir(page), to)
		}
		found = append(found, to+"#"+anchor)
	}
	return found
}

// anchors of a page's headings, as GitHub makes them.
func anchors(text string) (found []string) {
	for _, m := range headingPattern.FindAllStringSubmatch(fencePattern.ReplaceAllString(text, ""), -1) {
		plain := notInAnchor.ReplaceAllString(strings.ToLower(linkPattern.ReplaceAllString(m[1], "")), "")
		found = append(found, strings.ReplaceAll(plain, " ", "-"))
	}
	return found
}

func TestEveryLinkLeadsSomewhere(t *testing.T) {
	t.Parallel()
	for _, page := range pages(t) {
		for _, link := range links(page, read(t, page)) {
			to, anchor, _ := strings.Cut(link, "#")
			if _, err := os.Stat(filepath.Join(repository, to)); err != nil {
				t.Errorf("%s: there is no %s", page, to)
			} else if anchor != "" && !slices.Contains(anchors(read(t, to)), anchor) {
				t.Errorf("%s: %s has no heading #%s", page, to, anchor)
			}
		}
	}
}

// Every page below docs/ is reached from its first one, by links alone.
func TestEveryPageIsReached(t *testing.T) {
	t.Parallel()
	reached := map[string]bool{}
	var follow func(page string)
	follow = func(page string) {
		if reached[page] || !strings.HasSuffix(page, ".md") {
			return
		}
		reached[page] = true
		for _, link := range links(page, read(t, page)) {
			to, _, _ := strings.Cut(link, "#")
			follow(to)
		}
	}
	require.Contains(t, links("README.md", read(t, "README.md")), "docs/README.md#", "the first page leads to it")
	follow("docs/README.md")
	for _, page := range pages(t) {
		if strings.HasPrefix(page, "docs/") && !reached[page] {
			t.Errorf("no page leads to %s", page)
		}
	}
}

// requirementsPage names what shows each requirement.
const requirementsPage = "docs/requirements.md"

func TestRequirementsNameWhatExists(t *testing.T) {
	t.Parallel()
	rows := 0
	for line := range strings.Lines(read(t, requirementsPage)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || len(cells) < 2 || strings.HasPrefix(cells[0], "---") || strings.TrimSpace(cells[0]) == "id" {
			continue
		}
		rows++
		for _, missing := range unknownNames(t, cells[len(cells)-1]) {
			t.Errorf("%s, %s: there is no %s", requirementsPage, strings.TrimSpace(cells[0]), missing)
		}
	}
	require.Greater(t, rows, 100)
}

// The check above finds what is not there, and only that.
func TestWhatRequirementsMayNotName(t *testing.T) {
	t.Parallel()
	for shown, want := range map[string][]string{
		"`t6.7/hold`, `ac1`, `lab-four`, `crash-worker/same-key`, `auto-ack`, invariant `nothing-lost`, `make lint`":     nil,
		"delivery.TestLabC1, .TestLabC2, notifyd.TestKilledWhileSending, target.TestEveryHopNamesTheMail, docs/adr/0009": nil,
		"`t6.9`":                       {"scenario, cell, mutant, invariant or command t6.9"},
		"`t6.7/soon`":                  {"scenario, cell, mutant, invariant or command t6.7/soon"},
		"`make coffee`":                {"scenario, cell, mutant, invariant or command make coffee"},
		"delivery.TestNothing":         {"test delivery.TestNothing"},
		"delivery.TestLabC1, .TestC9":  {"test delivery.TestC9"},
		"nowhere.TestLabC1":            {"package of nowhere.TestLabC1"},
		"docs/adr/0099, system/nobody": {"file docs/adr/0099", "file system/nobody"},
	} {
		require.Equal(t, want, unknownNames(t, shown), shown)
	}
}

var (
	codePattern = regexp.MustCompile("`([^`]+)`")
	testPattern = regexp.MustCompile(`([\w/]*)\.(Test\w+)`)
	filePattern = regexp.MustCompile(`(?:docs|system|infra)/[\w./-]+`)
	makePattern = regexp.MustCompile(`(?:^| )make ([\w-]+)$`)
)

// unknownNames lists what a cell names and nothing is called.
func unknownNames(t *testing.T, cell string) (missing []string) {
	t.Helper()
	for _, m := range codePattern.FindAllStringSubmatch(cell, -1) {
		if !known(t, m[1]) {
			missing = append(missing, "scenario, cell, mutant, invariant or command "+m[1])
		}
	}
	pkg := ""
	for _, m := range testPattern.FindAllStringSubmatch(cell, -1) {
		if m[1] != "" {
			pkg = m[1]
		}
		dir := packageDir(pkg)
		if dir == "" {
			missing = append(missing, "package of "+pkg+"."+m[2])
		} else if !hasTest(t, dir, m[2]) {
			missing = append(missing, "test "+pkg+"."+m[2])
		}
	}
	cell = testPattern.ReplaceAllString(linkPattern.ReplaceAllString(cell, ""), "")
	for _, name := range filePattern.FindAllString(cell, -1) {
		// "docs/adr/0009" is enough to find it.
		if found, err := filepath.Glob(filepath.Join(repository, name+"*")); err != nil || len(found) == 0 {
			missing = append(missing, "file "+name)
		}
	}
	return missing
}

// known reports whether a word in code is a name that a command takes.
func known(t *testing.T, name string) bool {
	t.Helper()
	if m := makePattern.FindStringSubmatch(name); m != nil {
		return strings.Contains(read(t, "Makefile"), "\n"+m[1]+":")
	}
	if slices.Contains(verify.Names(), name) || ownInvariant(t, name) {
		return true
	}
	planted, err := mutants.All()
	require.NoError(t, err)
	if slices.ContainsFunc(planted, func(m mutants.Mutant) bool { return m.Name == name }) {
		return true
	}
	_, err = scenarios.Select(scenarios.All(scenarios.Draw{}), []string{name})
	return err == nil
}

// ownInvariant reports whether a scenario judges something under the name; only
// its source says so.
func ownInvariant(t *testing.T, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(repository, "scenarios", "*.go"))
	require.NoError(t, err)
	return slices.ContainsFunc(files, func(file string) bool {
		body, err := os.ReadFile(file)
		require.NoError(t, err)
		return !strings.HasSuffix(file, "_test.go") && strings.Contains(string(body), `"`+name+`"`)
	})
}

// packageDir of a package as the page names it: below system/, below
// system/cmd/, or at the root; "" when there is none.
func packageDir(pkg string) string {
	for _, dir := range []string{"system/" + pkg, "system/cmd/" + pkg, pkg} {
		if info, err := os.Stat(filepath.Join(repository, dir)); err == nil && info.IsDir() {
			return dir
		}
	}
	return ""
}

func hasTest(t *testing.T, dir, test string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(repository, dir, "*_test.go"))
	require.NoError(t, err)
	return slices.ContainsFunc(files, func(file string) bool {
		body, err := os.ReadFile(file)
		require.NoError(t, err)
		return strings.Contains(string(body), "\nfunc "+test+"(")
	})
}
