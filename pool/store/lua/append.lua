-- append: add tokens to a running job's log. Repeating it changes nothing; a gap or an overlap answers where to resend from.
-- Who follows the job is told here and now, and sent the entries with it where they are small: pool/store/hints.py.
-- KEY job hash
-- KEY log list packed entries
-- ARG token str
-- ARG attempt str
-- ARG nonce str
-- ARG first_seq tokens logged before the first of these
-- ARG count tokens in these entries
-- ARG entries list
-- ARG channels str what a node's channel begins with
-- ARG most bytes of entries that a message may hold
-- INCLUDE fence
-- FLAGS allow-oom
-- RETURN {"ok", watch} | {"old", log end} | {"resend", log end} | {"stale", state} | {"gone"}
local refusal, seen = refused(job, attempt, nonce)
if refusal then return refusal end
local logged = tonumber(seen[4] or 0)
if first_seq + count <= logged then return {'old', logged} end
if first_seq ~= logged then return {'resend', logged} end
local length = 0
for i = 1, #entries, 1000 do
  length = redis.call('RPUSH', log, unpack(entries, i, math.min(i + 999, #entries)))
end
redis.call('HSET', job, 'tokens', logged + count)
local watch, message = seen[5] or '', nil
for node in string.gmatch(watch, '%S+') do
  -- A dot behind a node's name: it waits for the end alone.
  if string.sub(node, -1) ~= '.' then
    if not message then
      local sizes, bytes = {token, length - #entries}, 0
      for i, entry in ipairs(entries) do sizes[i + 2], bytes = #entry, bytes + #entry end
      message = bytes > most and token or table.concat(sizes, ' ') .. '\n' .. table.concat(entries)
    end
    redis.call('PUBLISH', channels .. node, message)
  end
end
return {'ok', watch}
