#!/bin/sh
# Sends requests to the gateways of compose.yml while their Redis is killed for 20 seconds, and prints the statuses. Needs curl.
set -eu
cd "$(dirname "$0")"

# 30 requests, to the three gateways in turn.
send() {
    for i in $(seq 30); do
        curl -s -o /dev/null -w '%{http_code}\n' -H 'x-api-key: key-of-bob' "http://localhost:300$((i % 3 + 1))/"
    done | sort | uniq -c
}

echo "Redis decides:"
send
docker compose -f compose.yml kill redis
echo "Redis is killed, and the gateways decide:"
send
sleep 20
docker compose -f compose.yml start redis
sleep 2
echo "Redis decides again:"
send
