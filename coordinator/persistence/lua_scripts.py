"""Lua scripts that run inside Redis. Each may run twice with the same effect, so that writes can be retried.

A record of another shape never raises there. It is reported as UNREADABLE, or replaced where the data is at hand.
"""

from __future__ import annotations

from outrider.protocol.speculation import FinishReason

NONE, STOP, LENGTH, CANCELLED = map(int, FinishReason)
MAX_REQUEST_BYTES = 64 * 1024 * 1024
MAX_TOKENS_BYTES = 16 * 1024 * 1024
MAX_LOGPROBS_BYTES = 256 * 1024 * 1024
MAX_FIELD_BYTES = 1024
MAX_WORKER_BYTES = 256 * 1024
MAX_EPOCH_DIGITS = 15  # larger integers are inexact in Lua

_SHAPES = f"""
local function is(key, wanted) return redis.call('TYPE', key).ok == wanted end
local function absent(key) return is(key, 'none') end
local function text_or_none(key) return is(key, 'string') or absent(key) end
-- Epoch of a valid session record, or nil.
local function epoch_of(key)
  local text = is(key, 'hash') and redis.call('HGET', key, 'epoch')
  if text and #text <= {MAX_EPOCH_DIGITS} and string.find(text, '^%d+$') then return tonumber(text) end
end
local function expire(seconds)
  for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, seconds) end
end
"""

WRITE = f"""{_SHAPES}
-- KEYS: session, tokens, logprobs.
-- ARGV: epoch, owner, request, model, ttl, offset, data, finish, verifier, tenant, offset and data of logprobs,
-- 1 if the output cannot be answered without them.
local held = epoch_of(KEYS[1])
if (held == nil and not absent(KEYS[1])) or not text_or_none(KEYS[2]) or not text_or_none(KEYS[3]) then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  held = nil
end
local epoch = tonumber(ARGV[1])
local owner, finish = unpack(redis.call('HMGET', KEYS[1], 'owner', 'finish'))
local late = finish == '{CANCELLED}' and owner == ARGV[2] and held == epoch + 1  -- its client may have more tokens
if held and not late and (held > epoch or held == epoch and owner ~= ARGV[2]) then
  return finish == '{CANCELLED}' and 'CANCELLED' or 'FENCED'
end
if (held == nil or held < epoch) and ARGV[3] == '' then return 'MISSING' end
if held ~= epoch and not late then redis.call('DEL', KEYS[1], KEYS[2], KEYS[3]) end  -- evicted, or an older state
if ARGV[3] ~= '' and not late then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', ARGV[2], 'request', ARGV[3], 'model', ARGV[4])
  redis.call('HSET', KEYS[1], 'tenant', ARGV[10], 'logprobs', ARGV[13])
end
local offset = tonumber(ARGV[6])
if redis.call('STRLEN', KEYS[2]) < offset or redis.call('STRLEN', KEYS[3]) < tonumber(ARGV[11]) then return 'GAP' end
if #ARGV[7] > 0 then redis.call('SETRANGE', KEYS[2], offset, ARGV[7]) end
if #ARGV[12] > 0 then redis.call('SETRANGE', KEYS[3], ARGV[11], ARGV[12]) end
if ARGV[8] ~= '0' and not late then redis.call('HSET', KEYS[1], 'finish', ARGV[8]) end
redis.call('HSET', KEYS[1], 'verifier', ARGV[9])
expire(ARGV[5])
return late and 'CANCELLED' or 'OK'
"""

CLAIM = f"""{_SHAPES}
-- KEYS: session, tokens, logprobs. ARGV: owner, ttl, tenant, id of this call.
-- Takes a session over unless it has finished; returns fields, tokens and logprobs. Other tenants' sessions are absent.
if absent(KEYS[1]) then return false end
if epoch_of(KEYS[1]) == nil or not text_or_none(KEYS[2]) or not text_or_none(KEYS[3]) then return 'UNREADABLE' end
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if tenant and tenant ~= ARGV[3] then return false end
if redis.call('HSTRLEN', KEYS[1], 'request') > {MAX_REQUEST_BYTES} then return 'UNREADABLE' end
for _, name in ipairs({{'finish', 'model', 'verifier', 'tenant'}}) do
  if redis.call('HSTRLEN', KEYS[1], name) > {MAX_FIELD_BYTES} then return 'UNREADABLE' end
end
local finish = redis.call('HGET', KEYS[1], 'finish') or '0'
if finish == '{NONE}' or finish == '{STOP}' or finish == '{LENGTH}' then  -- what was evicted is computed again
  if redis.call('HGET', KEYS[1], 'logprobs') == '1' and redis.call('STRLEN', KEYS[3]) == 0 then
    redis.call('DEL', KEYS[2])
  end
  if redis.call('STRLEN', KEYS[2]) == 0 then redis.call('HDEL', KEYS[1], 'finish') end
end
if redis.call('STRLEN', KEYS[2]) > {MAX_TOKENS_BYTES} then return 'UNREADABLE' end
if redis.call('STRLEN', KEYS[3]) > {MAX_LOGPROBS_BYTES} then return 'UNREADABLE' end
if (redis.call('HGET', KEYS[1], 'finish') or '0') == '0' then
  local epoch = redis.call('HGET', KEYS[1], 'epoch')
  if redis.call('HGET', KEYS[1], 'call') ~= ARGV[4] .. epoch then epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1) end
  redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'call', ARGV[4] .. epoch)
end
expire(ARGV[2])
local fields = redis.call('HMGET', KEYS[1], 'request', 'epoch', 'finish', 'model', 'verifier', 'tenant')
return {{fields, redis.call('GET', KEYS[2]) or '', redis.call('GET', KEYS[3]) or ''}}
"""

CANCEL = f"""{_SHAPES}
-- KEYS: session. ARGV: finish, tenant, id of this call.
-- The owner is fenced by the new epoch. Other tenants' sessions are absent.
if absent(KEYS[1]) then return -1 end
if epoch_of(KEYS[1]) == nil then return -2 end
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if tenant and tenant ~= ARGV[2] then return -1 end
if redis.call('HGET', KEYS[1], 'call') == ARGV[3] .. redis.call('HGET', KEYS[1], 'epoch') then return 1 end
if (redis.call('HGET', KEYS[1], 'finish') or '0') ~= '0' then return 0 end
redis.call('HSET', KEYS[1], 'finish', ARGV[1], 'call', ARGV[3] .. redis.call('HINCRBY', KEYS[1], 'epoch', 1))
return 1
"""

READ_WORKER = f"""{_SHAPES}
-- KEYS: worker.
if absent(KEYS[1]) then return false end
if not is(KEYS[1], 'hash') or redis.call('HSTRLEN', KEYS[1], 'data') > {MAX_WORKER_BYTES} then return 'UNREADABLE' end
for _, name in ipairs({{'coordinator', 'at', 'mac'}}) do
  if redis.call('HSTRLEN', KEYS[1], name) > {MAX_FIELD_BYTES} then return 'UNREADABLE' end
end
return redis.call('HMGET', KEYS[1], 'data', 'coordinator', 'at', 'mac')
"""

REMOVE_WORKER = f"""{_SHAPES}
-- KEYS: worker. ARGV: coordinator. Only the coordinator that wrote it last may remove it.
if is(KEYS[1], 'hash') and redis.call('HGET', KEYS[1], 'coordinator') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
