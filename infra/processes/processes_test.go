package processes

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/infra/guardian"
	"mailproof/infra/infratest"
	"mailproof/internal/setup"
)

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	goleak.VerifyTestMain(m)
}

// tempFolder makes a folder for temporary files that this test alone uses and
// that servers of other users may enter. Its path is short, which t.TempDir's
// is not: a Unix socket's path ends at 107 bytes.
func tempFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "mpt-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

func TestConformance(t *testing.T) {
	tmp := tempFolder(t)
	t.Setenv("TMPDIR", tmp)
	paths := setup.Locate()
	require.NotEmpty(t, paths.KafkaLib, "Kafka's jars are missing: run \"mailproof setup\"")
	require.NotEmpty(t, paths.Java, "Java is missing: run \"mailproof setup\"")
	infratest.Run(t, New(paths), infratest.Features{Signals: true, Guards: true, KafkaKind: "apache"})
}
