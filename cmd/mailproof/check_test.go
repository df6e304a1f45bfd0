package main

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEvidenceThatMayOnlyBeRead hides no verdict; any other failure to write does.
func TestEvidenceThatMayOnlyBeRead(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, unlessReadOnly(&out, nil))
	require.Empty(t, out.String())
	require.NoError(t, unlessReadOnly(&out, fmt.Errorf("report: %w", &fs.PathError{Op: "open", Path: "summary.json", Err: fs.ErrPermission})))
	require.Contains(t, out.String(), "stay as they were: report: open summary.json")
	full := errors.New("no space left on device")
	require.ErrorIs(t, unlessReadOnly(&out, full), full)
}
