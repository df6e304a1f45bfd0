package scenarios

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/target"
)

// systemDir is the source of the system, as a test of this package finds it.
const systemDir = "../system"

// crashPointsOfSource reads the names of all crash points from the source, with
// the places that pass them.
func crashPointsOfSource(t *testing.T) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	constants := map[string]map[string]string{} // folder → constant → value
	var calls []struct {
		dir, place string
		arg        ast.Expr
	}
	err := filepath.WalkDir(systemDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, 0)
		if err != nil {
			return err
		}
		dir := filepath.Dir(path)
		if constants[dir] == nil {
			constants[dir] = map[string]string{}
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ValueSpec:
				for i, name := range n.Names {
					if i < len(n.Values) {
						if text, ok := literal(n.Values[i]); ok {
							constants[dir][name.Name] = text
						}
					}
				}
			case *ast.CallExpr:
				sel, ok := n.Fun.(*ast.SelectorExpr)
				if pkg, isName := ast.Expr(nil), false; ok {
					pkg = sel.X
					id, isIdent := pkg.(*ast.Ident)
					isName = isIdent && id.Name == "failpoint" && sel.Sel.Name == "At"
					if isName {
						require.Len(t, n.Args, 1)
						calls = append(calls, struct {
							dir, place string
							arg        ast.Expr
						}{dir, set.Position(n.Pos()).String(), n.Args[0]})
					}
				}
			}
			return true
		})
		return nil
	})
	require.NoError(t, err)
	for _, c := range calls {
		name, ok := literal(c.arg)
		if id, isIdent := c.arg.(*ast.Ident); !ok && isIdent {
			name, ok = constants[c.dir][id.Name], constants[c.dir][id.Name] != ""
		}
		require.Truef(t, ok, "%s: the name of a crash point must be a constant of its package", c.place)
		found[name] = append(found[name], c.place)
	}
	return found
}

func literal(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(lit.Value)
	return text, err == nil
}

// crashPointsOfTable are the names that the table runs or leaves to others.
func crashPointsOfTable() map[string]bool {
	names := map[string]bool{}
	for _, p := range CrashPoints() {
		if p.stage == "" {
			names[p.Name] = true
		}
	}
	for name := range elsewhere() {
		names[name] = true
	}
	return names
}

// A crash point that nobody runs proves nothing, and a line of the table without
// one would never be reached.
func TestEveryCrashPointIsInTheTable(t *testing.T) {
	t.Parallel()
	source, table := crashPointsOfSource(t), crashPointsOfTable()
	require.NotEmpty(t, source)
	for name, places := range source {
		require.Truef(t, table[name], "crash point %q (%s) is not in the crash table: scenarios/crash_points.go", name, places)
	}
	for _, name := range slices.Sorted(maps.Keys(table)) {
		require.NotEmptyf(t, source[name], "the crash table names %q, and the source has no such point", name)
	}
	for _, p := range CrashPoints() {
		require.NotContains(t, elsewhere(), p.Name, "it is in the table, and said to be elsewhere")
	}
}

// Cells are found by name: in evidence, by --point, in the table.
func TestCrashPointsHaveNamesOfTheirOwn(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, p := range CrashPoints() {
		require.Falsef(t, seen[p.ID()], "two lines are called %s", p.ID())
		seen[p.ID()] = true
		require.NotEmpty(t, p.Between)
		require.NotContains(t, p.ID(), ",", "names are listed with commas")
		require.NotZero(t, p.asleep)
		ran := false
		for _, s := range crashes(Draw{}) {
			for _, c := range s.Cells {
				ran = ran || slices.Contains(s.FaultsOf(c), faultOf(p, actKill)) && slices.Contains(s.FaultsOf(c), faultOf(p, actPause))
			}
		}
		require.Truef(t, ran, "no scenario runs %s", p.ID())
	}
	require.Len(t, crashShort().FaultNames, 14, "a point of crash-short has another name now")
}

// R13: a release build does not even hold the names of the crash points, and a
// tagged one holds each in the program that passes it.
func TestReleaseBinariesHoldNoCrashPoints(t *testing.T) {
	t.Parallel()
	release, err := target.Build(t.Context(), target.BuildConfig{Dir: t.TempDir()})
	require.NoError(t, err)
	tagged, err := target.Build(t.Context(), target.BuildConfig{Dir: t.TempDir(), Tags: []string{"failpoint"}})
	require.NoError(t, err)
	read := func(b target.Binaries) map[string][]byte {
		programs := map[string][]byte{}
		for name, path := range map[string]string{"bookingd": b.Bookingd, "notifyd": b.Notifyd} {
			programs[name], err = os.ReadFile(path)
			require.NoError(t, err)
		}
		return programs
	}
	without, with := read(release), read(tagged)
	for name := range crashPointsOfTable() {
		for program, text := range without {
			require.Falsef(t, bytes.Contains(text, []byte(name)), "the release build of %s holds %q", program, name)
		}
	}
	for _, p := range CrashPoints() {
		if p.stage == "" {
			require.Truef(t, bytes.Contains(with[p.Process], []byte(p.Name)), "the tagged build of %s does not hold %q", p.Process, p.Name)
		}
	}
}
