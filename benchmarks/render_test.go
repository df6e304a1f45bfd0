package benchmarks

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestGoldenDocument: the document of a stored result, word for word.
func TestGoldenDocument(t *testing.T) {
	t.Parallel()
	r, err := Read("testdata/result.json")
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "notes.md"), []byte("Written by a person.\n"), 0o644))
	out := filepath.Join(dir, "result.md")
	require.NoError(t, WriteDocument(r, out))
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile("testdata/result.md", got, 0o644))
	}
	want, err := os.ReadFile("testdata/result.md")
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

// TestPlotsAreSVG: each plot is well-formed, has a title and a ground of its own.
func TestPlotsAreSVG(t *testing.T) {
	t.Parallel()
	r, err := Read("testdata/result.json")
	require.NoError(t, err)
	for _, p := range plots() {
		svg, err := p.draw(r)
		require.NoError(t, err, p.name)
		require.NotEmpty(t, svg, p.name)
		require.Contains(t, string(svg), "<title>", p.name)
		require.NotContains(t, string(svg), "NaN", p.name)
		require.NotContains(t, string(svg), "Inf", p.name)
		in := xml.NewDecoder(bytes.NewReader(svg))
		for {
			_, err := in.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err, p.name)
		}
	}
}

// TestEmptyResult: a run whose parts all failed still gives a document, which
// says so, and no plot.
func TestEmptyResult(t *testing.T) {
	t.Parallel()
	r := &Result{Schema: SchemaVersion, Parts: []PartOutcome{{Name: "hops", Error: "no broker answered"}}}
	out := filepath.Join(t.TempDir(), "empty.md")
	require.NoError(t, WriteDocument(r, out))
	body, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Contains(t, string(body), "Not measured: no broker answered.")
	require.Equal(t, 5, strings.Count(string(body), "| not measured |"))
	files, err := filepath.Glob(filepath.Join(filepath.Dir(out), "*.svg"))
	require.NoError(t, err)
	require.Empty(t, files)
}

// TestSaveAndRead: what is saved is read again, and saving it again gives the
// same bytes.
func TestSaveAndRead(t *testing.T) {
	t.Parallel()
	r, err := Read("testdata/result.json")
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "again.json")
	require.NoError(t, r.Save(path))
	again, err := Read(path)
	require.NoError(t, err)
	require.Equal(t, r, again)
	if *update {
		require.NoError(t, r.Save("testdata/result.json"))
	}
	want, err := os.ReadFile("testdata/result.json")
	require.NoError(t, err)
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

func TestReadRefusesAnotherSchema(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "old.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"schema": 99}`), 0o644))
	_, err := Read(path)
	require.ErrorContains(t, err, "schema 99")
}
