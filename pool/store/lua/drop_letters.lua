-- drop_letters: remove dead letters. The stream goes with its last one: an empty stream would stay for ever.
-- KEY dead stream
-- ARG entries list stream ids, 1 to 100
-- FLAGS allow-oom
-- RETURN how many were still there
local dropped = redis.call('XDEL', dead, unpack(entries))
if redis.call('XLEN', dead) == 0 then redis.call('DEL', dead) end
return dropped
