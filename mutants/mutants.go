// Package mutants holds known defects of notification systems, one patch file
// each, and builds the system with one of them planted. A harness that stays
// green over a planted defect proves nothing; "make mutants" shows, for each
// defect, the scenario and the invariant that turned red.
//
// A patch's file name is the defect's name; it begins with header lines that say
// what it is:
//
//	Title: messages are acked when they arrive, not when the mail is settled
//	Trap: TRAP-M6-1
//	Scenario: t6.2/resend
//	Invariant: nothing-lost
//	Criterion: AC3
//	Env: NOTIFYD_SWEEPER=off
//
// Env removes the net that would mask the defect (design: mutants run with the
// net beneath them removed); where the net is code, the patch takes it out too.
// Trap names the requirement. Criterion, where there is one, is the acceptance
// criterion whose line in "mailproof gate" must be red. The work tree is never touched: the patched files
// go to the build through "go build -overlay".
package mutants

import (
	"bufio"
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

//go:embed *.patch
var patches embed.FS

// Mutant is one known defect.
type Mutant struct {
	Name      string // file name without .patch
	Title     string // what is wrong, one line
	Trap      string // id in the requirements
	Scenario  string // scenario/policy that must turn red
	Invariant string // checker that must find it
	Criterion string // acceptance criterion that must be red, "" if none is about it
	Env       map[string]string
	patch     []byte
}

// All reads every patch, in order of name.
func All() ([]Mutant, error) {
	entries, err := patches.ReadDir(".")
	if err != nil {
		return nil, fmt.Errorf("reading the embedded patches: %w", err)
	}
	all := make([]Mutant, 0, len(entries))
	for _, e := range entries {
		body, err := patches.ReadFile(e.Name())
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", e.Name(), err)
		}
		m, err := parse(strings.TrimSuffix(e.Name(), ".patch"), body)
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

// parse reads the header of a patch; everything from the first "--- " line on
// is the patch itself.
func parse(name string, body []byte) (Mutant, error) {
	m := Mutant{Name: name, Env: map[string]string{}}
	at := bytes.Index(body, []byte("--- "))
	if at < 0 {
		return m, fmt.Errorf("mutant %s: no line begins with \"--- \": this is not a patch", name)
	}
	m.patch = body[at:]
	lines := bufio.NewScanner(bytes.NewReader(body[:at]))
	for lines.Scan() {
		field, value, ok := strings.Cut(lines.Text(), ": ")
		if !ok {
			continue
		}
		switch field {
		case "Title":
			m.Title = value
		case "Trap":
			m.Trap = value
		case "Scenario":
			m.Scenario = value
		case "Invariant":
			m.Invariant = value
		case "Criterion":
			m.Criterion = value
		case "Env":
			key, val, ok := strings.Cut(value, "=")
			if !ok {
				return m, fmt.Errorf("mutant %s: Env %q is not NAME=value", name, value)
			}
			m.Env[key] = val
		}
	}
	if m.Title == "" || m.Trap == "" || m.Scenario == "" || m.Invariant == "" {
		return m, fmt.Errorf("mutant %s: Title, Trap, Scenario and Invariant must be given", name)
	}
	return m, nil
}

// files lists the paths that the patch changes, as its "+++ b/" lines name them.
func (m Mutant) files() []string {
	var files []string
	lines := bufio.NewScanner(bytes.NewReader(m.patch))
	for lines.Scan() {
		if path, ok := strings.CutPrefix(lines.Text(), "+++ b/"); ok {
			files = append(files, strings.TrimSpace(path))
		}
	}
	return files
}

// Overlay applies the patch to copies of the files below root, in dir, and
// returns the path of an overlay file for "go build -overlay". An error means
// that the patch does not apply any more: the code it mutates has moved on.
func (m Mutant) Overlay(root, dir string) (string, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return "", fmt.Errorf("mutant %s: %w", m.Name, err)
	}
	replace := map[string]string{}
	for _, file := range m.files() {
		body, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return "", fmt.Errorf("mutant %s: %w", m.Name, err)
		}
		copied := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(copied), 0o755); err != nil {
			return "", fmt.Errorf("mutant %s: %w", m.Name, err)
		}
		if err := os.WriteFile(copied, body, 0o644); err != nil {
			return "", fmt.Errorf("mutant %s: %w", m.Name, err)
		}
		replace[filepath.Join(root, file)] = copied
	}
	if err := m.apply(dir); err != nil {
		return "", err
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", fmt.Errorf("mutant %s: %w", m.Name, err)
	}
	path := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(path, overlay, 0o644); err != nil {
		return "", fmt.Errorf("mutant %s: %w", m.Name, err)
	}
	return path, nil
}

// apply runs git apply, which finds a hunk again after its lines have moved and
// refuses one whose context has changed.
func (m Mutant) apply(dir string) error {
	cmd := exec.Command("git", "apply", "--whitespace=nowarn", "-p1", "-")
	cmd.Dir = dir
	// Without a ceiling git would look for a repository above dir and read the
	// paths as that repository's.
	cmd.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir), "GIT_DIR="+filepath.Join(dir, "none"))
	cmd.Stdin = bytes.NewReader(m.patch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("mutant %s does not apply any more (its code has changed; renew the patch): %w: %s",
			m.Name, err, bytes.TrimSpace(out))
	}
	return nil
}

// Check applies every patch to scratch copies and returns the first error.
func Check(root string) error {
	all, err := All()
	if err != nil {
		return err
	}
	for _, m := range all {
		dir, err := os.MkdirTemp("", "mailproof-mutant-")
		if err != nil {
			return fmt.Errorf("mutant %s: %w", m.Name, err)
		}
		_, err = m.Overlay(root, dir)
		if rmErr := os.RemoveAll(dir); err == nil {
			err = rmErr
		}
		if err != nil {
			return err
		}
	}
	return nil
}
