package target

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadinessNamesTheParts(t *testing.T) {
	t.Parallel()
	why := reasons([]byte(`{"database":"no route","lane ticket":"ok","publisher":"not connected"}`))
	require.Equal(t, "database: no route; publisher: not connected", why)
	require.Equal(t, "reason: the database does not answer", reasons([]byte(`{"status":"not ready","reason":"the database does not answer"}`)))
	require.Equal(t, "not ready: <html>", reasons([]byte("<html>\n")))
	require.Equal(t, "not ready", reasons([]byte(`{}`)))
}

func TestOnlyAChangeOfPartsIsAChange(t *testing.T) {
	t.Parallel()
	require.True(t, sameParts("database: dial 127.0.0.1:1", "database: dial 127.0.0.1:2"))
	require.False(t, sameParts("database: away", "database: away; publisher: away"))
	require.False(t, sameParts("", "database: away"))
	require.True(t, sameParts("", ""))
}
